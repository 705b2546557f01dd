"""A custom model: any nn.Module. This one maps points `[N, 2]` to logits `[N, num_classes]`."""

from __future__ import annotations

from torch import Tensor, nn


class SpiralNet(nn.Module):
    """Two hidden layers.

    Args:
        width: features of each hidden layer.
        num_classes: number of classes.
    """

    def __init__(self, width: int = 64, num_classes: int = 3) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, num_classes)
        )

    def forward(self, points: Tensor) -> Tensor:
        logits: Tensor = self.layers(points)
        return logits
