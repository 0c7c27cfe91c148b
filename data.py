"""From tables to batches: the splits of the rows, and the dataset.

The dataset builds a complete batch at once, from a list of row numbers.

Shapes: N nodes, n samples of T targets in the tables; B samples with P perturbed nodes in a batch;
K effects of a node.
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torch_geometric.data import Data
from torch_geometric.utils import cumsum, scatter

from data_cells import SPLITS, check_is_no_pipe, unreadable
from data_tables import Tables, cached_by_code, read_tables
from errors import DataError, counted
from mask import doses, starts_of_samples
from metrics import mean_and_std
from parts import optional

LARGE_SHARE = 0.1  # share of the rows above which a set of knock-outs is large
EXAMPLE = Path(__file__).with_name("example")  # the tables that are read by default


@dataclass(frozen=True)
class DataConfig:
    edges: str = field(default="", metadata={"path": True})
    perturbations: str = field(default="", metadata={"path": True})
    features: str = field(default="", metadata={"path": True})
    scores: list = field(default_factory=list)
    undirected: bool = False
    batch_size: int = field(default=128, metadata={"min": 1, "resume": "fixed"})
    split: Literal["random", "sets", "nodes"] = "random"
    split_seed: int = field(default=0, metadata={"min": 0, "max": 2**32 - 1})
    fold: str = ""
    val_fraction: float = field(default=0.1, metadata={"min": 0, "max": 1})
    test_fraction: float = field(default=0.1, metadata={"min": 0, "max": 1})
    workers: int = field(default=0, metadata={"min": 0})
    cache_dir: str = field(default=".cache", metadata={"path": True})

    def __post_init__(self):
        fold = re.fullmatch(r"(\d+)/(\d+)", self.fold)
        if self.fold and not (fold and int(fold[1]) < int(fold[2])):
            raise ValueError(f"data.fold={self.fold} must be k/K with 0 <= k < K, such as 0/5")
        if bool(self.edges) != bool(self.perturbations):
            raise ValueError("data.edges or data.perturbations is missing: set both or neither")


def load(config: DataConfig) -> Tables:
    """Returns the tables that `config` names, or the tables of the example, with their split.

    The tables and the split are cached if there is a cache folder. Raises `DataError` if a file is
    missing, malformed or empty, if a split has no rows, or if options of the split are set although
    the table has a column split.
    """
    config = with_example(config)
    files = [config.edges, config.perturbations, config.features]
    digests = [path and file_digest(path) for path in files]  # "" for a file that is not given
    options = [config.scores, config.undirected]
    # `cached_by_code` does not hash the code of data_notes, which `optional` imports, but the
    # tables contain its notes.
    data_notes = optional("data_notes")
    code = file_digest(data_notes.__file__) if data_notes else ""
    # The key includes the paths, because the notes quote them.
    key = f"{files} {digests} {options} {code}"

    def read() -> dict[str, Any]:
        return vars(read_tables(*files, *options))

    tables = Tables(**cached_by_code(config.cache_dir, "tables", read_tables, key, read))
    of_split = ("split", "split_seed", "val_fraction", "test_fraction", "fold")
    if tables.split is None:
        make_split = node_split if config.split == "nodes" else random_split
        key += "".join(f" {getattr(config, name)}" for name in of_split)
        split_rows = partial(make_split, tables, config)
        # The cached split also depends on the code of this module and of the modules that it
        # imports, such as data_tables.
        tables.split = cached_by_code(config.cache_dir, "split", make_split, key, split_rows)
    else:
        given = [name for name in of_split if getattr(config, name) != getattr(DataConfig, name)]
        if given:
            replaced = ", ".join(f"data.{name}" for name in given)
            problem = f"{config.perturbations} has a column split, which replaces {replaced}"
            raise DataError(f"{problem}: remove the column, or leave out the options")
    for split in SPLITS:
        if len(tables.rows(split)) == 0:
            problem = f"the {split} split of {counted(len(tables.y), 'row')} is empty"
            advice = "add rows, or change the column split or, if it is missing, data.split, "
            advice += "val_fraction, test_fraction or fold"
            raise DataError(f"{config.perturbations}: {problem}: {advice}")
    return tables


def with_example(config: DataConfig) -> DataConfig:
    """Returns `config`, or a copy with the tables of the example if it does not name any tables."""
    if config.edges:
        return config
    return replace(config, edges=f"{EXAMPLE}/edges.tsv", perturbations=f"{EXAMPLE}/scores.tsv")


def file_digest(path: str) -> str:
    """Returns the SHA-256 hash of a file; raises `DataError` if it cannot be read."""
    check_is_no_pipe(path)
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    except OSError as error:
        raise unreadable(path, error) from None
    return digest.hexdigest()


# ---- Splits --------------------------------------------------------------------------------------
def random_split(tables: Tables, config: DataConfig) -> Tensor:
    """Returns a random split, int8 [n], in which rows of the same nodes and levels stay together.

    With `split=sets`, rows of the same nodes stay together at any levels. Sets with more than
    `LARGE_SHARE` of the rows, and the set of intact rows, are used for training if there are enough
    other sets for validation and test, so that a single set does not dominate the metrics.

    With `fold`, each set is tested in one of the folds, even if it is large or intact.
    """
    set_number = tables.set_number(with_levels=config.split != "sets")
    rows_of_set = torch.bincount(set_number)
    generator = torch.Generator().manual_seed(config.split_seed)
    order = torch.randperm(len(rows_of_set), generator=generator)
    start, num_test = place_of_test(len(order), config)
    order = order.roll(-start)
    # Large sets follow all usual sets, and the intact set comes last. The sets that a fold tests
    # come first, even if they are large or intact.
    turn = (rows_of_set > LARGE_SHARE * len(set_number)).long()
    turn[set_number[tables.perturbed_ptr.diff() == 0]] = 2
    if config.fold:
        turn[order[:num_test]] = -1
    order = order[turn[order].argsort(stable=True)]
    return split_in_order(order, config, len(order))[set_number]


def node_split(tables: Tables, config: DataConfig) -> Tensor:
    """Returns a split by nodes, int8 [n], in which no training row has a test or validation node.

    The knocked-out nodes are shuffled. In this order, the validation nodes directly follow the test
    nodes. Rows with a test node are test rows, and rows with a validation node are validation rows.
    Rows with both are in no split, -1.
    """
    nodes = tables.perturbed.unique()
    seed = config.split_seed if config.fold else 0
    start, _ = place_of_test(len(nodes), config)
    order = nodes[np.random.default_rng(seed).permutation(len(nodes))].roll(-start)
    split_of_node = split_in_order(order, config, len(tables.genes))
    sample = tables.sample()
    split_of_perturbed = split_of_node[tables.perturbed]
    # In `SPLITS`, train is 0, val is 1 and test is 2.
    split = scatter(split_of_perturbed, sample, dim_size=len(tables.y), reduce="max")
    is_val_of_test_row = (split_of_perturbed > 0) & (split_of_perturbed < split[sample])
    split[sample[is_val_of_test_row]] = -1
    return split


def split_in_order(order: Tensor, config: DataConfig, size: int) -> Tensor:
    """Returns a split of numbered items, int8 [size].

    `order` has the numbers of the items: first the test items, then the validation items. All
    remaining items, and items that are not in `order`, are for training.
    """
    _, num_test = place_of_test(len(order), config)
    num_val = round(len(order) * config.val_fraction)
    split = torch.zeros(size, dtype=torch.int8)
    split[order[:num_test]] = SPLITS.index("test")
    split[order[num_test : num_test + num_val]] = SPLITS.index("val")
    return split


def place_of_test(count: int, config: DataConfig) -> tuple[int, int]:
    """Returns two numbers: the position of the first test item, and the number of test items.

    The position is an index in the shuffled order of all items. `count` is the number of all items.
    An item is a set of knock-outs or, with split=nodes, a node.
    """
    if config.fold:
        k, num_folds = map(int, config.fold.split("/"))
        start = count * k // num_folds
        return start, count * (k + 1) // num_folds - start
    num_test = round(count * config.test_fraction)
    start = config.split_seed * num_test if config.split == "nodes" else 0
    return start, num_test


# ---- Batches -------------------------------------------------------------------------------------
def weight_scale(tables: Tables) -> Tensor:
    """Returns the factor by which the weights of each target are multiplied, float64 [T].

    After scaling, the sum of a target's weights over the training rows with its score is equal to
    the number of all training rows. Each target then counts the same, however many of its scores
    are missing.
    """
    rows = tables.rows("train")
    return len(rows) / tables.score_weight(rows).sum(dim=0)


@dataclass
class KnockoutDataset(Dataset):
    """A dataset of the tables' rows that builds a complete batch from a list of row numbers.

    The row number -1 means padding: a row without knock-outs, whose other entries are 0. A batch is
    a PyG `Data` with

    - `perturbed` [P], `perturbed_batch` [P] and `perturbed_ptr` [B + 1]: the perturbed nodes;
    - `level` [P]: their levels, 0 for deleted nodes;
    - `y` and `weight`, [B, T] each: scores and their weights, 0 for missing scores;
    - `index` [B]: row numbers;
    - `num_dead_edges`: the number D of dead edges, an int, because the host uses it as a size;
    - the columns of `Tables.columns` and `columns`, by their names. A column is either a tensor
      [n, ...], from which the batch contains the entries of its rows, or a function, whose result
      for the batch is added to the batch.
    """

    tables: Tables
    degree: Tensor  # the `degree` of `SharedGraph`, long [N]
    transform: Callable[[Data], Data] | None = None  # applied to each batch, such as `ReachPlanner`
    scale: Tensor | float = 1.0  # the `weight_scale` of the training tables
    # The `out_degree` of `SharedGraph`. If it is given, batches have a field `starts`, so that the
    # host does not have to wait for the GPU.
    out_degree: Tensor | None = None
    columns: dict[str, Tensor | Callable[[Data], Tensor]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tables.y)

    def with_samples(self, samples: Tables) -> "KnockoutDataset":
        """Returns a dataset of other samples on the same graph.

        It keeps the columns that are functions. It does not have the columns that are tensors,
        because these belong to the rows of this dataset.
        """
        functions = {name: column for name, column in self.columns.items() if callable(column)}
        return replace(self, tables=samples, columns=functions)

    def total_weight(self, rows: Tensor) -> Tensor:
        """Returns the sum of the scaled weights of each target over these rows, float64 [T]."""
        return self.scale * self.tables.score_weight(rows).sum(dim=0)

    def __getitem__(self, row: int) -> Data:
        return self.__getitems__([row])

    def __getitems__(self, rows: Sequence[int]) -> Data:
        """Returns the batch of these rows; raises `IndexError` for a node outside [0, N)."""
        index = torch.as_tensor(rows, dtype=torch.long)
        is_real = index >= 0
        row = index.clamp(min=0)
        start = self.tables.perturbed_ptr[row]
        ptr = cumsum((self.tables.perturbed_ptr[row + 1] - start) * is_real)
        sample = torch.repeat_interleave(ptr.diff())
        position = torch.arange(len(sample)) + (start - ptr[:-1])[sample]
        perturbed = self.tables.perturbed[position]
        level = self.tables.level[position]
        num_nodes = len(self.degree)
        is_outside = (perturbed < 0) | (perturbed >= num_nodes)
        if is_outside.any():
            first = int(is_outside.nonzero()[0])
            problem = f"knocked-out node {perturbed[first]} is outside [0, {num_nodes})"
            raise IndexError(f"sample {index[sample[first]]}: {problem}, the range of all nodes")
        weight = self.scale * self.tables.score_weight(row) * is_real.unsqueeze(1)
        batch = Data(
            perturbed=perturbed,
            perturbed_batch=sample,
            perturbed_ptr=ptr,
            level=level,
            y=self.tables.y[row].nan_to_num() * is_real.unsqueeze(1),
            weight=weight.float(),
            index=index,
            num_dead_edges=int(self.degree[perturbed[level == 0]].sum()),
        )
        for name, column in {**self.tables.columns, **self.columns}.items():
            if callable(column):
                batch[name] = column(batch)
            else:
                batch[name] = column[row]
                batch[name][~is_real] = 0
        if self.out_degree is not None:
            batch.starts = starts_of_samples(perturbed, ptr, self.out_degree)
        return self.transform(batch) if self.transform else batch


# ---- Units, weights and doses, computed from the training rows -----------------------------------
def basis_of(tables: Tables) -> Tensor:
    """Returns the matrix that maps the three `mask.doses` of a level to K doses, float64 [3, K].

    The levels of the training rows determine the number of effects of a node, K. Gains and losses
    have separate effects if both occur. Deletions and losses have separate effects if both
    deletions and levels between 0 and 1 occur.

    Each column is scaled so that the mean square of its non-zero doses in training is 1. One
    penalty is then suitable for all effects.
    """
    is_trained = tables.is_in("train") & ~tables.y.isnan().all(dim=1)
    level, count = tables.level[is_trained[tables.sample()]].unique(return_counts=True)
    count = count.double()
    columns = [[1.0, 1.0, 0.0]]  # 1 - level
    if (level < 1).any() and (level > 1).any():
        columns = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    if (level == 0).any() and ((level > 0) & (level < 1)).any():
        columns.append([0.0, 0.0, 1.0])
    basis = torch.tensor(columns, dtype=torch.float64).T
    dose = doses(level) @ basis
    mean_square = (count @ dose.square()) / (count @ (dose != 0).double())
    return basis / mean_square.sqrt().nan_to_num(1.0)


def mean_one_weight(tables: Tables) -> Tensor:
    """Returns the weights of all scores, 0 for missing scores, [n, T].

    For each target, they are scaled to a mean of 1 over the training rows that have its score.
    """
    weight = tables.score_weight(slice(None))
    of_train = tables.score_weight(tables.rows("train"))
    return weight * ((of_train > 0).sum(dim=0) / of_train.sum(dim=0))


def training_mean_and_std(tables: Tables) -> tuple[Tensor, Tensor]:
    """Returns the weighted mean and standard deviation of the training scores, [T] each."""
    rows = tables.rows("train")
    return mean_and_std(tables.y[rows], mean_one_weight(tables)[rows])
