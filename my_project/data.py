"""A custom data set: any class with `__len__` and `__getitem__`."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Spirals(Dataset[tuple[Tensor, int]]):
    """Points on the arms of a spiral, one class for each arm: `(point [2], class)`.

    Args:
        samples: number of points.
        seed: of the points and the noise; use another one for each split.
        arms: number of classes.
        noise: standard deviation of the points, in units of the radius.
    """

    def __init__(self, samples: int = 900, seed: int = 0, arms: int = 3, noise: float = 0.05) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.arange(samples) % arms
        radius = torch.rand(samples, generator=generator).sqrt()
        angle = 4 * radius + self.labels * (2 * math.pi / arms)
        points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
        self.points = points + noise * torch.randn(samples, 2, generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.points[index], int(self.labels[index])
