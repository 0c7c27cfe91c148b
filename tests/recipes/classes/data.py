"""Vectors of ten classes, and a dataset that builds a complete batch of them at once.

Shapes: n rows of F numbers; B samples in a batch.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torch_geometric.data import Data

NUM_CLASSES = 10
NUM_FEATURES = 20
SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class DataConfig:
    rows: int = field(default=2003, metadata={"min": 100})
    batch_size: int = field(default=128, metadata={"min": 1, "resume": "fixed"})
    workers: int = field(default=0, metadata={"min": 0})


@dataclass
class Vectors(Dataset):
    """Vectors x [n, F], their classes y, long [n], and the index of their split, long [n]."""

    x: Tensor
    y: Tensor
    split: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def __getitems__(self, rows: Sequence[int]) -> Data:
        """Returns the batch of some rows; -1 is padding with weight 0."""
        index = torch.as_tensor(rows, dtype=torch.long)
        row = index.clamp(min=0)
        weight = (index >= 0).to(self.x.dtype)
        return Data(x=self.x[row], y=self.y[row], weight=weight, index=index)

    def total_weight(self, rows: Tensor) -> Tensor:
        """Returns the sum of the weights of some rows, [1]."""
        return torch.tensor([len(rows)], dtype=torch.float64)

    def fingerprint(self) -> str:
        """Returns a hash of the vectors; a run is only resumed with the same vectors."""
        digest = hashlib.sha256()
        for values in (self.x, self.y, self.split):
            digest.update(values.numpy().tobytes())
        return digest.hexdigest()


def read_vectors(config: DataConfig) -> Vectors:
    """Returns clusters of random vectors; your own may come from any file."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(NUM_CLASSES, NUM_FEATURES, generator=generator)
    y = torch.randint(NUM_CLASSES, (config.rows,), generator=generator)
    x = centres[y] + torch.randn(config.rows, NUM_FEATURES, generator=generator)
    split = torch.zeros_like(y)
    split[8::10] = SPLITS.index("val")
    split[9::10] = SPLITS.index("test")
    return Vectors(x, y, split)
