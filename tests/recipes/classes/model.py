"""A perceptron with one hidden layer."""

from dataclasses import dataclass, field

from torch import Tensor, nn
from torch_geometric.data import Data


@dataclass(frozen=True)
class ModelConfig:
    hidden: int = field(default=64, metadata={"min": 1})


class Perceptron(nn.Module):
    """Maps vectors [B, F] to logits [B, C] of the classes."""

    def __init__(self, config: ModelConfig, num_features: int, num_classes: int):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(num_features, config.hidden),
            nn.ReLU(),
            nn.Linear(config.hidden, num_classes),
        )

    def forward(self, graph: None, batch: Data) -> Tensor:
        return self.layers(batch.x)
