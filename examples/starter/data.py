"""The data: any class with `__len__` and `__getitem__`. `conf/config.yaml` names one for each split."""

import math

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Spirals(Dataset):
    """Points on the three arms of a spiral, and the number of the arm: `(point [2], class)`."""

    def __init__(self, samples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.arange(samples) % 3
        radius = torch.rand(samples, generator=generator).sqrt()
        angle = 4 * radius + self.labels * (2 * math.pi / 3)
        points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
        self.points = points + 0.05 * torch.randn(samples, 2, generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.points[index], int(self.labels[index])
