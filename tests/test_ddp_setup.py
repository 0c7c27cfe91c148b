"""Real processes: gradients, results and errors do not depend on the number of ranks."""

import contextlib
import weakref
from collections.abc import Callable

import pytest
import torch

from ddp_setup import DDPConfig, Distributed
from tests.conftest import fork_ranks, join
from tests.tools.runs import difference, read_metrics

ON_FOUR_RANKS = (
    "gradients",
    "gradient_of_an_epoch",
    "evaluation",
    "options",
    "buffers",
    "zero",
    "agreement",
)


@pytest.fixture(scope="session")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], None]:
    """four_ranks(name) asserts that a function of tests/workers.py has ended on each of four ranks.

    One group of ranks calls all functions; those after one that fails or hangs are not called.
    """
    folder = tmp_path_factory.mktemp("ranks")
    command = ["in_one_group", *ON_FOUR_RANKS]
    _store, ranks = fork_ranks(folder, 4, "tests/workers.py", command)
    with contextlib.suppress(AssertionError):  # which says that they hang
        join(ranks, timeout=60)
    errors = [(folder / f"rank{rank}.stderr").read_text() for rank in range(4)]

    unended = []
    for name in ON_FOUR_RANKS:
        if not all((folder / f"{name}{rank}").exists() for rank in range(4)):
            unended.append(name)

    def has_ended(name: str) -> None:
        assert name not in unended, f"{unended[0]} fails or hangs\n" + "\n".join(errors)

    return has_ended


def test_gradients_do_not_depend_on_the_world_size(four_ranks):
    four_ranks("gradients")


def test_the_gradient_of_an_epoch_is_that_of_the_reported_loss(four_ranks, workers):
    four_ranks("gradient_of_an_epoch")
    workers(1, "in_one_group", "gradient_of_an_epoch")


def test_evaluation_is_exact_with_any_number_of_rows(four_ranks):
    four_ranks("evaluation")


def test_options_reach_ddp(four_ranks):
    four_ranks("options")


def test_constant_buffers_are_not_broadcast(four_ranks):
    four_ranks("buffers")


@pytest.mark.slow
def test_parameters_without_a_gradient_are_named(train):
    result = train(2, fault="layer_without_gradient")
    assert result.returncode == 1
    assert "did not receive grad" in result.stderr and "unused.weight" in result.stderr
    allowed = "ddp.options={find_unused_parameters: true}"
    train(2, allowed, fault="layer_without_gradient").check()


def test_sync_batchnorm_is_refused_on_the_cpu(train):
    result = train(2, "ddp.sync_batchnorm=true", CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 2
    assert result.stderr.count("error: ddp.sync_batchnorm=true needs GPUs") == 1


def test_zero_shards_the_optimiser_state(four_ranks):
    four_ranks("zero")


@pytest.mark.slow
def test_zero_gives_the_same_result_and_interchangeable_checkpoints(train, tmp_path):
    settings = ["optim.precision=fp64", "optim.epochs=2", "checkpoint.every_steps=3"]
    train(0, *settings, "run.name=plain", "checkpoint.keep_last=9").check()
    train(2, *settings, "run.name=zero", "checkpoint.keep_last=9", "optim.zero=true").check()
    middle = "run.resume=runs/{}/checkpoints/step_00000006.pt"
    train(0, *settings, "run.name=from_zero", middle.format("zero")).check()
    train(2, *settings, "run.name=to_zero", middle.format("plain"), "optim.zero=true").check()

    def last_state(name: str) -> dict:
        file = tmp_path / "runs" / name / "checkpoints/step_00000010.pt"
        return torch.load(file, weights_only=True)

    plain = last_state("plain")
    for other in map(last_state, ("zero", "from_zero", "to_zero")):
        for name, value in plain["model"].items():
            assert (other["model"][name] - value).norm() <= 1e-9 * value.norm(), name
        assert other["optimizer"]["state"].keys() == plain["optimizer"]["state"].keys()


def test_ranks_agree_on_errors_and_values(four_ranks):
    four_ranks("agreement")


@pytest.mark.parametrize("name", ["too_few_gpus", "shared_gpu"])
def test_all_ranks_refuse_a_launch_that_has_too_few_gpus(workers, tmp_path, name):
    workers(2, name)
    assert {path.name for path in tmp_path.glob("refused*")} == {"refused0", "refused1"}


def test_a_scheduler_may_expose_one_gpu_to_each_process(workers):
    workers(2, "own_gpu")


def test_an_option_that_differs_between_ranks_is_named(train):
    result = train(2, fault="other_option_on_rank_1:optim.lr=0.5")
    assert result.returncode == 2
    assert result.stderr == "error: optim.lr differs between ranks: 0.5 on rank 1, 0.01 on rank 0\n"


@pytest.mark.slow
def test_a_run_gives_the_same_model_and_metrics_on_1_2_and_4_ranks(train, tmp_path):
    settings = ["optim.precision=fp64", "model.dropout=0.3", "optim.epochs=2"]
    runs = {"one": (0, ["optim.accumulate=4"]), "two": (2, ["optim.accumulate=2"]), "four": (4, [])}
    for name, (nproc, arguments) in runs.items():
        train(nproc, *settings, *arguments, f"run.name={name}").check()
    for name in ("two", "four"):
        assert difference(tmp_path / "runs" / name, tmp_path / "runs/one", 1e-9) == ""


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.slow
def test_low_precision_trains(train, tmp_path, precision):
    train(2, f"optim.precision={precision}", "optim.epochs=4", f"run.name={precision}").check()
    losses = [row["loss"] for row in read_metrics(tmp_path / "runs" / precision, "train")]
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])  # of the last and the first epoch
    state = torch.load(tmp_path / f"runs/{precision}/checkpoints/best.pt", weights_only=True)
    assert all(value.dtype == torch.float32 for value in state["model"].values())
    assert (state["scaler"].get("scale", 1) > 1) is (precision == "fp16")


def test_a_ddp_module_does_not_outlive_its_group():
    """It would wait for a gloo thread that waits for it."""
    env = Distributed(DDPConfig())
    module = torch.nn.Linear(1, 1)
    gone = weakref.ref(module)
    env.cleanup.callback(lambda: gone() and pytest.fail("it is there when the group is left"))
    env.on_failure = lambda reason, module=module: None  # as `RunFolder` holds a run's state
    del module
    env.close()
