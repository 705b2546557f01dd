"""Handwritten digits: 1,797 real images of 8x8 pixels, which this package contains."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from hydraloop.data.bundled import find_data_file, read_table
from hydraloop.data.in_memory import InMemoryDataset
from hydraloop.data.split import stratified_split


class Digits(InMemoryDataset):
    """One part of the handwritten digits: 1,259 (train), 179 (val) and 359 (test) images, classes in equal shares.

    Images are float32 `[N, 1, 8, 8]`, normalised by the train part's mean and standard deviation (one of each for all
    pixels); targets are int64 `[N]`, 0..9. Loading takes about 10 ms, once a process for all three parts.

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI repository, its test set.

    Args:
        split: `train`, `val` or `test`.
        root: a folder with `digits.csv.gz`; None: the copy in hydraloop.
        split_seed: of the split. It is not the run's seed, so that runs with different seeds are comparable.

    Raises:
        UserError: the split is unknown, or the folder does not have the file.
    """

    mean: float
    """Subtracted from the pixels (0..16)."""
    std: float
    """By which the pixels were then divided."""

    def __init__(self, split: str, root: str | None = None, split_seed: int = 0) -> None:
        path = find_data_file("digits.csv.gz", root=root)
        images, labels = _part(path, split, split_seed)
        self.mean, self.std = _mean_and_std(path, split_seed)
        super().__init__((images - self.mean) / self.std, labels, classes=[str(n) for n in range(10)])


def _part(path: Path, split: str, split_seed: int) -> tuple[Tensor, Tensor]:
    """Return the images `[N, 1, 8, 8]`, 0..16, and the labels `[N]` of one part."""
    table = read_table(path, ",")
    labels = table[:, -1].to(torch.int64)
    chosen = stratified_split(labels, split, seed=split_seed)
    return table[chosen, :-1].to(torch.float32).view(-1, 1, 8, 8), labels[chosen]


@lru_cache(maxsize=8)
def _mean_and_std(path: Path, split_seed: int) -> tuple[float, float]:
    """Return the mean and the standard deviation of the train part, which all three parts of a run need."""
    images, _ = _part(path, "train", split_seed)
    return images.mean().item(), images.std().item()
