"""Captures training steps as CUDA graphs, which a GPU replays without the overhead of the host.

An eager step launches hundreds of kernels one by one. The host needs about 20 ms for this, for
batches of any size. A CUDA graph launches all kernels of a step with one call. But a replay has
fixed shapes and fixed addresses, and repeats everything that Python did during capture. Therefore:

1. `FixedShape` pads all full batches of a rank to the same shapes.
2. `GraphedModel` replays the forward and backward pass for these batches, and calls the model for
   all other batches.
3. `GraphedUpdate` replays the optimiser's part of the step.
4. `first_difference` compares captured passes with eager passes before the first step.

`capture` does all of this, and is the only function that train.py calls. This part is optional: a
copy with model.cuda_graphs=false does not need this file.

Shapes: B samples with P perturbed nodes in a batch.
"""

import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.cuda import CUDAGraph, make_graphed_callables, mem_get_info
from torch.cuda import graph as cuda_graph
from torch.optim import AdamW
from torch_geometric.data import Data

from mask import SharedGraph, num_samples

log = logging.getLogger("model_graphs")

NOT_INPUTS = ("y", "weight")  # tensors of a batch that only the loss reads
# Largest fraction of the free memory that the messages of a batch of fixed shape may need.
SHARE_OF_MEMORY = 0.1

# Gradients are accumulated on the stream of the first capture, not on the stream that computes
# them. torch warns about this, but it synchronises the two streams.
warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream does not match")


def capture(step_parts: Any, state: Any, task: Any, sampler: Any, ddp: Any) -> Any:
    """Captures training steps on a GPU, and returns the components of captured steps.

    If the capture is impossible on at least one rank, it returns the components of eager steps. The
    reason is in their `note`, which is a text for the log. The function restores all parameters,
    buffers and generators of torch. All ranks must call it.

    Args:
        step_parts: the `train.StepParts` of eager steps, with the model before DDP wraps it.
        state: the `TrainState` of the same model.
        task: a `task.KnockoutTask` with the dataset and the loss of training.
        sampler: the `data_loader.StepSampler` of the training batches.
        ddp: the `ddp_setup.Distributed` of this rank.
    """
    model = state.model
    obstacle = obstacle_of_options(task)
    if not obstacle:
        num_rows = min(sampler.batch_size, len(sampler.rows))
        size = math.ceil(num_rows / (sampler.num_replicas * sampler.accumulate))
        shape = FixedShape.of_rows(task.dataset, sampler.rows.long(), size)
        obstacle = obstacle_of_shape(shape, task, ddp)
    if not obstacle:
        dataset = replace(task.dataset, transform=shape)
        pairs = []
        for rows in (sampler.rows[:size], sampler.rows[-size:]):
            batch = task.dataset.__getitems__(rows).to(ddp.device)
            pairs.append((batch, dataset.__getitems__(rows).to(ddp.device)))
        with ddp.phase("capturing"), undone(model, ddp.device_ids or []):
            graphed, obstacle = try_to_capture(model, task, pairs)
    # All ranks must make the same kind of steps: if one rank has an obstacle, all steps are eager.
    obstacle = next(filter(None, ddp.gather(obstacle)), "")
    if obstacle:
        return step_parts._replace(note=f"; no CUDA graphs, because {obstacle}")
    update = GraphedUpdate(step_parts.update, state)
    return step_parts._replace(model=graphed, dataset=dataset, update=update, note="; CUDA graphs")


def obstacle_of_options(task: Any) -> str:
    """Returns the reason why the options exclude CUDA graphs, or "" if they do not."""
    options = task.config.model
    if getattr(task.dataset, "out_degree", None) is None:
        return "batches do not have the field starts"
    if task.dataset.transform or options.message_passing not in ("auto", "shared", "reach"):
        return f"batches of model.message_passing={options.message_passing} differ in their shapes"
    if task.config.ddp.sync_batchnorm:
        return "with ddp.sync_batchnorm=true, the forward pass waits for other ranks"
    if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1" or torch.is_anomaly_enabled():
        return "CUDA_LAUNCH_BLOCKING or anomaly detection is enabled"
    return ""


# ---- Batches of fixed shape ----------------------------------------------------------------------
@dataclass
class FixedShape:
    """Pads full batches to the same shapes, as the `transform` of a dataset.

    A padded batch has as many perturbed nodes as the largest batch that B rows can make. The
    padding consists of nodes that a sample does not perturb, with level 1. A node at level 1 is
    intact, so the padding does not change the predictions.
    """

    num_samples: int  # B
    num_perturbed: int  # P, after padding
    num_out_edges: int  # upper bound of the number of edges that leave these nodes

    @classmethod
    def of_rows(cls, dataset: Any, rows: Tensor, size: int) -> "FixedShape":
        """Returns the shape of all batches of `size` rows.

        The batches consist of any of the `rows`, long [rows], of a `data.KnockoutDataset`.
        """
        tables = dataset.tables
        count = tables.perturbed_ptr.diff()
        edges = torch.zeros_like(count)
        edges.index_add_(0, tables.sample(), dataset.out_degree[tables.perturbed])
        largest = [values[rows].sort(descending=True).values[:size] for values in (count, edges)]
        return cls(size, *(int(values.sum()) for values in largest))

    def __call__(self, batch: Data) -> "Data | PackedBatch":
        """Returns a full batch after padding and packing it, and any other batch unchanged.

        A full batch has B samples, and not more perturbed nodes and edges than the fixed shape.
        """
        missing = self.num_perturbed - len(batch.perturbed)
        is_larger = missing < 0 or batch.starts[1, -1] > self.num_out_edges
        if num_samples(batch) != self.num_samples or is_larger:
            return batch
        # The padding is added to the sample with the fewest perturbed nodes. If the batch needs any
        # padding, this sample does not perturb all nodes of the graph.
        sample = int(batch.perturbed_ptr.diff().argmin())
        first, last = batch.perturbed_ptr[sample : sample + 2].tolist()
        perturbed = set(batch.perturbed[first:last].tolist())
        intact = next(node for node in range(last - first + 1) if node not in perturbed)
        for name, value in (("perturbed", intact), ("perturbed_batch", sample), ("level", 1.0)):
            batch[name] = nn.functional.pad(batch[name], (0, missing), value=value)
        batch.num_out_edges = self.num_out_edges
        return PackedBatch(batch)


class PackedBatch:
    """A batch packed into one tensor, which is pinned and moved to a device in one operation."""

    def __init__(self, batch: Data):
        fields = batch.to_dict()
        names = [name for name, value in fields.items() if isinstance(value, Tensor)]
        # Tensors with the widest numbers come first. The offset of each tensor is then a multiple
        # of the size of its numbers, as `Tensor.view(dtype)` requires.
        names.sort(key=lambda name: fields[name].element_size(), reverse=True)
        tensors = {name: fields.pop(name) for name in names}
        self.packed = torch.cat([value.flatten().view(torch.uint8) for value in tensors.values()])
        self.parts = [(name, value.dtype, value.shape) for name, value in tensors.items()]
        self.others = fields

    def pin_memory(self) -> "PackedBatch":
        self.packed = self.packed.pin_memory()
        return self

    def to(self, device: torch.device, non_blocking: bool = False) -> Data:
        """Returns the unpacked batch, on a device."""
        batch = Data(**self.others)
        packed = self.packed.to(device, non_blocking=non_blocking)
        sizes = [dtype.itemsize * shape.numel() for _, dtype, shape in self.parts]
        for (name, dtype, shape), part in zip(self.parts, packed.split(sizes), strict=True):
            batch[name] = part.view(dtype).view(shape)
        return batch


def obstacle_of_shape(shape: FixedShape, task: Any, ddp: Any) -> str:
    """Returns the reason why batches of a fixed shape are not captured, or "" if they can be."""
    options = task.config.model
    states = task.graph.edge_weight.new_empty(task.graph.num_nodes, options.hidden)
    if options.has_knockout_pass and task.graph.samples_at_once(states) < shape.num_samples:
        return "batches are so large that their computation takes longer than launching it"
    free, _ = mem_get_info(ddp.device)
    num_messages = len(task.graph.relations) * shape.num_perturbed + shape.num_out_edges
    size = num_messages * options.hidden * task.graph.edge_weight.element_size()
    if size <= SHARE_OF_MEMORY * free:
        return ""
    return f"padded batches would take {size / 2**30:.2g} GB of {free / 2**30:.2g} GB free memory"


# ---- Graphs --------------------------------------------------------------------------------------
class GraphedModel(nn.Module):
    """Computes a model's predictions, and replays CUDA graphs in training if this is possible.

    It replays the forward pass, and later the backward pass, for training batches with the captured
    shapes. It calls the model itself for batches with different shapes, in evaluation, without
    gradients, and after a parameter or buffer has been moved, frozen or unfrozen.

    Args:
        model: the model, which becomes the submodule `model`.
        graph: the graph, on the GPU.
        batch: an example of a padded batch, on the GPU. Its shapes are captured.
    """

    def __init__(self, model: nn.Module, graph: SharedGraph, batch: Data):
        super().__init__()
        self.model = model
        inputs = {}
        for name, value in batch.to_dict().items():
            if isinstance(value, Tensor) and name not in NOT_INPUTS:
                inputs[name] = value.clone()
        self.shapes = {name: value.shape for name, value in inputs.items()}
        self.num_out_edges = batch.num_out_edges
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.gradients = [torch.zeros_like(parameter) for parameter in self.trained]
        # These are stored because searching all modules in each step would take five times as long.
        self.holders = [module._parameters for module in model.modules()]
        self.holders += [module._buffers for module in model.modules()]
        self.captured = self.places()
        flat = FlatModel(model, graph, list(inputs), self.num_out_edges)
        make_graphed_callables(flat, tuple(inputs.values()), allow_unused_input=True)
        self.replay = [flat]  # in a list, so that it is not registered as a submodule

    def forward(self, graph: SharedGraph, batch: Data) -> Tensor:
        """Returns the model's outputs, [B, T * C], in memory that no later replay overwrites."""
        in_training = self.model.training and torch.is_grad_enabled()
        if not (in_training and self.fits(batch) and self.is_as_captured()):
            return self.model(graph, batch)
        self._provide_gradients()
        return self.replay[0](*(batch[name] for name in self.shapes)).clone()

    def fits(self, batch: Data) -> bool:
        """Returns whether a batch has the same fields and shapes as the captured batch."""
        fields = batch.to_dict()
        shapes = {name: fields[name].shape for name in self.shapes if name in fields}
        return shapes == self.shapes and batch.get("num_out_edges") == self.num_out_edges

    def is_as_captured(self) -> bool:
        """Returns whether all parameters and buffers have the same `places` as during the capture.

        It logs a warning about the first difference. After this, it always returns False.
        """
        if self.captured and self.captured != self.places():
            self.captured = []
            log.warning(
                "note      CUDA graphs are no longer used, because parameters or buffers were "
                "moved, frozen or unfrozen"
            )
            for parameter in self.model.parameters():
                if not parameter.requires_grad:
                    # Without this, the optimiser would continue to change the parameter.
                    parameter.grad = None
        return bool(self.captured)

    def places(self) -> list[tuple[int, bool]]:
        """Returns the address and the `requires_grad` of each parameter and buffer."""
        places = []
        for holder in self.holders:
            for tensor in holder.values():
                if tensor is not None:
                    places.append((tensor.data_ptr(), tensor.requires_grad))
        return places

    def _provide_gradients(self) -> None:
        """Sets missing gradients to zeros, in memory that belongs to this object."""
        # Otherwise, the backward pass would use the graph's own tensor as the missing gradient. The
        # next replay would overwrite this tensor, instead of adding to it.
        added = []
        for parameter, gradient in zip(self.trained, self.gradients, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient
                added.append(gradient)
        if added:
            torch._foreach_zero_(added)


class FlatModel(nn.Module):
    """The model as a function of the tensors of a batch, as `make_graphed_callables` requires.

    Args:
        names: names of the tensors in a batch, in the order of the arguments of `forward`.
        num_edges: `num_out_edges` of each batch.
    """

    def __init__(self, model: nn.Module, graph: SharedGraph, names: Sequence[str], num_edges: int):
        super().__init__()
        self.model = model
        self.graph = [graph]  # in a list, so that it is not registered as a submodule
        self.names = names
        self.num_edges = num_edges

    def forward(self, *tensors: Tensor) -> Tensor:
        """Returns the outputs of the model for the batch with these tensors, [B, T * C]."""
        fields = dict(zip(self.names, tensors, strict=True))
        return self.model(self.graph[0], Data(**fields, num_out_edges=self.num_edges))


class GraphedUpdate:
    """Calls the optimiser's part of a step, and replays it as a CUDA graph if this is possible.

    A replay uses fixed addresses and options, but DDP may move gradients. Therefore, this part is
    captured in the first step in which all tensors have the same addresses, and all options have
    the same values, as in the step before. It is replayed until one of them changes. The function
    is called eagerly in each step if the optimiser is not fused AdamW, if the loss is scaled, or
    if a capture has failed.

    Args:
        update: a function `update(state, ...)` that makes the step, and returns a tensor.
        state: the `TrainState` of training.
    """

    def __init__(self, update: Callable[..., Tensor], state: Any):
        optimizer = state.optimizer
        is_fused = type(optimizer) is AdamW and optimizer.defaults["fused"]
        self.can_capture = is_fused and not state.scaler.is_enabled()
        self.update = update
        self.frozen = None  # addresses, options and arguments that a replay depends on
        self.graph = None

    def __call__(self, state: Any, *arguments: Any) -> Tensor:
        """Returns the result of `update(state, *arguments)`, which a replay may compute."""
        if not self.can_capture:
            return self.update(state, *arguments)
        frozen = (options_and_places(state.optimizer), arguments)
        if frozen != self.frozen:
            self.graph = None
        elif self.graph is None:
            self._capture(state, *arguments)
        self.frozen = frozen
        if self.graph is None:
            return self._update_in_place(state, *arguments)
        for group, lr in zip(state.optimizer.param_groups, self.lrs, strict=True):
            lr.fill_(group["lr"])
        self.graph.replay()
        return self.result.clone()

    def _update_in_place(self, state: Any, *arguments: Any) -> Tensor:
        """Returns the result of the function, which frees the gradients.

        Here, the gradients keep their memory, and are set to zero.
        """
        parameters = []
        for group in state.optimizer.param_groups:
            parameters += group["params"]
        gradients = [parameter.grad for parameter in parameters]
        try:
            result = self.update(state, *arguments)
        finally:  # also after an error, because the function is called again if a capture fails
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
        torch._foreach_zero_([gradient for gradient in gradients if gradient is not None])
        return result

    def _capture(self, state: Any, *arguments: Any) -> None:
        """Captures the function. Replays read the learning rates from the tensors `self.lrs`."""
        groups = state.optimizer.param_groups
        lrs = [group["lr"] for group in groups]
        self.lrs = [group["params"][0].new_empty((), dtype=torch.float32) for group in groups]
        graph = CUDAGraph()
        try:
            for group, lr in zip(groups, self.lrs, strict=True):
                group.update(lr=lr, capturable=True)
            with (
                undone_if_failed(self.lrs[0].device),
                # Another thread may be pinning batches.
                cuda_graph(graph, capture_error_mode="thread_local"),
            ):
                self.result = self._update_in_place(state, *arguments)
            self.graph = graph
        except Exception as error:
            self.can_capture = False
            log.warning(
                "note      the optimiser's step is eager, because its capture failed: "
                f"{reason(error)}"
            )
        finally:
            for group, lr in zip(groups, lrs, strict=True):
                group.update(lr=lr, capturable=False)


def options_and_places(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Returns all values that a replay of the optimiser's step depends on.

    They are the options of each group except the learning rate, and the addresses of all
    parameters, gradients and tensors of the optimiser's state.
    """
    found = []
    for group in optimizer.param_groups:
        found += [value for name, value in group.items() if name not in ("params", "lr")]
        for parameter in group["params"]:
            tensors = [parameter, parameter.grad, *optimizer.state.get(parameter, {}).values()]
            found += [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    return found


# ---- Verification --------------------------------------------------------------------------------
@contextmanager
def undone(model: nn.Module, devices: Sequence[int]) -> Iterator[None]:
    """After the block, restores the model's parameters, buffers and mode, and torch's generators.

    It also deletes the gradients. `devices` are the GPUs whose generators are restored.
    """
    tensors = [*model.parameters(), *model.buffers()]
    before = [tensor.detach().clone() for tensor in tensors]
    was_training = model.training
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        model.train(was_training)
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)


def try_to_capture(
    model: nn.Module, task: Any, pairs: Sequence[tuple[Data, Data]]
) -> tuple[GraphedModel | None, str]:
    """Captures the model, and compares captured passes with eager passes.

    It adds noise to the parameters, because terms that start at zero would hide a difference.

    Args:
        model: the model, whose parameters are changed.
        task: the task of training.
        pairs: some full training batches, on the GPU, each without and with padding.

    Returns:
        The captured model, or None if the capture failed; and the reason why it must not be used,
        or "" if it can be used.
    """
    optim = task.config.optim
    low = optim.autocast_dtype
    device = task.graph.device
    for seed, pair in enumerate(pairs):
        for batch in pair:
            batch.seed = torch.full((), seed, device=device)
    model.train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    try:
        with (
            undone_if_failed(device),
            torch.autocast(device.type, low, enabled=low is not None, cache_enabled=False),
        ):
            graphed = GraphedModel(model, task.graph, pairs[0][1])
        return graphed, first_difference(graphed, task, pairs)
    except Exception as error:  # drivers and models raise many kinds of errors
        log.warning(f"note      CUDA graphs cannot be captured: {reason(error)}")
        return None, "capturing them failed"


def reason(error: Exception) -> str:
    """Returns the type and the first line of the error that made a capture fail."""
    # After an error in the model, torch's end of the capture fails, too. The context of the second
    # error is the original error.
    cause = error.__context__ or error
    text = str(cause).partition("\n")[0]
    return f"{type(cause).__name__}: {text}"


@contextmanager
def undone_if_failed(device: torch.device) -> Iterator[None]:
    """If a capture fails in the block, restores the GPU's current stream and its generator.

    Without this, the stream of the capture would remain the current stream. In torch 2.11, the
    generator would also continue to wait for the end of the capture.
    """
    stream = torch.cuda.current_stream(device)
    try:
        yield
    except Exception:
        torch.cuda.set_stream(stream)
        generator = torch.cuda.default_generators[device.index]
        generator.graphsafe_set_state(generator.clone_state())
        raise


def first_difference(graphed: GraphedModel, task: Any, pairs: Sequence[tuple[Data, Data]]) -> str:
    """Compares the losses and gradients of captured passes and of eager passes.

    `pairs` are some batches, each without and with padding. Returns the reason why CUDA graphs must
    not be used, or "" if all losses and gradients are equal up to rounding. The captured model gets
    the padded batches, so a model whose predictions depend on padding is found, too.
    """
    tolerance = torch.finfo(task.config.optim.autocast_dtype or task.config.optim.dtype).eps ** 0.5
    for batch, padded in pairs:
        loss, gradients = loss_and_gradients(graphed.model, task, batch)
        other_loss, other_gradients = loss_and_gradients(graphed, task, padded)
        if not graphed.fits(padded):
            return "full training batches differ in their shapes"
        if not (loss - other_loss).abs() <= tolerance * loss.abs():
            return describe_difference("the loss")
        largest = max(gradient.norm() for gradient in gradients.values())
        for name, gradient in gradients.items():
            error = (other_gradients[f"model.{name}"] - gradient).norm()
            if not error <= tolerance * (gradient.norm() + 0.01 * largest):
                return describe_difference(f"the gradient of {name}")
    return ""


def describe_difference(name: str) -> str:
    """Logs a warning about a difference, and returns the reason why CUDA graphs are not used.

    `name` is the quantity that differs.
    """
    log.warning(
        f"note      with CUDA graphs, {name} of a batch differs from {name} in an eager step, so "
        "all steps are eager. Either the model depends on the padding of batches, nodes at level "
        "1, or a replay repeats random numbers, counts or decisions of Python code"
    )
    return f"they change {name} of a batch"


def loss_and_gradients(
    model: nn.Module, task: Any, batch: Data
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss of a batch, a scalar, and the gradients of the trained parameters by name.

    Layers that use torch's generators draw the same random numbers in each call. Raises
    `ValueError` for a trained parameter without a gradient.

    Args:
        model: the model or its `GraphedModel`, whose parameters get the gradients.
        task: the task, which computes the loss.
        batch: a batch on the GPU.
    """
    model.zero_grad(set_to_none=True)
    torch.manual_seed(int(batch.seed))
    low = task.config.optim.autocast_dtype
    with torch.autocast(task.graph.device.type, low, enabled=low is not None):
        output = model(task.graph, batch)
    loss = task.loss(output, batch).sum()
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                raise ValueError(f"{name} has no gradient")
            gradients[name] = parameter.grad.clone()
    return loss.detach(), gradients
