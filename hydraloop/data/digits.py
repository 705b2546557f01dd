"""Handwritten digits: 1,797 real images of 8x8 pixels, on every machine that has scikit-learn."""

from __future__ import annotations

import torch

from hydraloop.data.bundled import find_data_file, read_table
from hydraloop.data.split import stratified_split
from hydraloop.data.tensors import InMemoryDataset


class Digits(InMemoryDataset):
    """One part of the handwritten digits: 1,259 (train), 179 (val) and 359 (test) images, classes in equal shares.

    Images are float32 `[N, 1, 8, 8]`, normalised by the train part's mean and standard deviation (one of each for all
    pixels); targets are int64 `[N]`, 0..9. Loading takes about 30 ms, once a process for all three parts.

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI repository, its test set.

    Args:
        split: `train`, `val` or `test`.
        root: a folder that holds `digits.csv.gz`; None for the copy that scikit-learn brings along.
        split_seed: draws the split. It is not the run's seed, so that runs with different seeds are comparable.

    Raises:
        UserError: an unknown split, a folder without the file, or no scikit-learn.
    """

    mean: float
    """What was subtracted from the pixels (0..16)."""
    std: float
    """What they were divided by then."""

    def __init__(self, split: str, root: str | None = None, split_seed: int = 0) -> None:
        table = read_table(find_data_file("digits.csv.gz", root=root), ",")
        pixels = table[:, :-1].to(torch.float32).view(-1, 1, 8, 8)
        labels = table[:, -1].to(torch.int64)
        train = pixels[stratified_split(labels, "train", seed=split_seed)]
        chosen = stratified_split(labels, split, seed=split_seed)
        self.mean, self.std = train.mean().item(), train.std().item()
        super().__init__((pixels[chosen] - self.mean) / self.std, labels[chosen], classes=[str(n) for n in range(10)])
