"""The classification of vectors, as a task of train.py: dataset, model, loss and metrics.

Shapes: B samples in a batch, n rows, C classes.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from torch import Tensor, nn
from torch_geometric.data import Data

from config import Config
from data import NUM_CLASSES, NUM_FEATURES, SPLITS, Vectors, read_vectors
from ddp_setup import Distributed
from losses import LOSSES
from metrics import metrics_beside_rivals
from model import Perceptron
from run_checkpoint import Origin


@dataclass
class ClassesTask:
    config: Config
    dataset: Vectors
    fingerprint: str

    graph = None  # samples do not share a graph
    rivals = ()  # there are no other predictions
    route = "a perceptron"  # for the log
    num_targets = 1  # number of losses of a row
    output_shape = (NUM_CLASSES,)  # shape of a row's output
    captures_steps = False  # no CUDA graphs
    is_cheap_per_sample = True

    @classmethod
    def load(cls, config: Config, ddp: Distributed) -> "ClassesTask":
        with ddp.sync_errors():
            dataset = read_vectors(config.data)
            dataset.x = dataset.x.to(config.optim.dtype)
            return cls(config, dataset, dataset.fingerprint())

    def rows(self, split: str) -> Tensor:
        """Returns the row numbers of one split."""
        return (self.dataset.split == SPLITS.index(split)).nonzero().flatten()

    def build_model(self) -> nn.Module:
        return Perceptron(self.config.model, NUM_FEATURES, NUM_CLASSES)

    def check_plan(self, model: nn.Module) -> None:
        """Does nothing, because batches have no plan."""

    def by_score(self, output: Tensor, batch: Data) -> Tensor:
        """Returns the model's output for a batch, with the `output_shape` for each sample."""
        return output

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        """Returns the loss of each row, [n], given outputs [n, C] and classes y [n]."""
        return LOSSES[self.config.optim.loss](output, y)

    def loss(self, output: Tensor, batch: Data) -> Tensor:
        """Returns the weighted sum of a batch's losses, [1]."""
        return (batch.weight * self.losses(output, batch.y)).sum().view(1)

    def metrics(self, split: str, output: Tensor) -> dict[str, float]:
        """Returns the metrics of a split by name, given outputs [n, C]."""
        y = self.dataset.y[self.rows(split)]
        prediction = output.argmax(dim=1)
        each = metrics_beside_rivals(y.view(-1, 1), {"prediction": prediction.view(-1, 1)}, {})
        means = {name: metric.item() for name, metric in each.items()}
        return {"loss": self.losses(output, y).mean().item(), **means, "n": len(y), "rows": len(y)}

    def result_lines(self, output: Tensor) -> Iterator[str]:
        """Yields the lines of test.tsv, given outputs [n, C] of the test rows."""
        rows = self.rows("test")
        columns = (rows, self.dataset.y[rows], output.argmax(dim=1))
        yield "row\tclass\tprediction\n"
        for cells in zip(*(column.tolist() for column in columns), strict=True):
            yield "\t".join(map(str, cells)) + "\n"

    def origin(self, code: dict[str, str]) -> Origin:
        """Returns the `Origin` to store in checkpoints, given hashes of the code of their steps."""
        free_options = self.config.free_options()
        return Origin(asdict(self.config), self.fingerprint, code=code, free_options=free_options)

    def summary(self) -> str:
        return f"{len(self.dataset):,} vectors of {NUM_FEATURES} numbers, {NUM_CLASSES} classes"

    def notes(self) -> list[str]:
        return []


KnockoutTask = ClassesTask  # the name that train.py and evaluate.py import
