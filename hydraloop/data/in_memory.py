"""Data sets in memory: `InMemoryDataset`, which returns whole batches, and the handwritten digits."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hydraloop.errors import UserError


class InMemoryDataset(Dataset[tuple[Tensor, Tensor]]):
    """Inputs and targets as two tensors.

    A DataLoader calls `__getitems__` once for a batch, so a batch takes two index operations, instead of one for each
    sample and a collation.

    Args:
        inputs: `[N, ...]`.
        targets: `[N]` (class indices) or `[N, ...]`.
        classes: names of the classes, in the order of their indices; None: they have no names.

    Raises:
        ValueError: inputs and targets differ in length.
    """

    def __init__(self, inputs: Tensor, targets: Tensor, classes: Sequence[str] | None = None) -> None:
        if len(inputs) != len(targets):
            raise ValueError(f"{len(inputs)} inputs, but {len(targets)} targets")
        self.inputs = inputs
        self.targets = targets
        self.classes = None if classes is None else tuple(classes)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return one sample: the input `[...]` and its target."""
        return self.inputs[index], self.targets[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Return one stacked batch: the inputs `[B, ...]` and the targets `[B, ...]` (copies, not views)."""
        chosen = torch.tensor(indices, dtype=torch.int64)
        return self.inputs[chosen], self.targets[chosen]


_DATA = Path(__file__).parent / "files"


def find_data_file(name: str, *, root: str | None) -> Path:
    """Return the path of a data file: in `root`; if `root` is None, in this package.

    Args:
        name: of the file, `digits.csv.gz`.
        root: a folder with the file, or None.

    Raises:
        UserError: there is no such file.
    """
    path = (_DATA if root is None else Path(root).expanduser()) / name
    if not path.is_file():
        raise UserError(
            f"there is no file {path}",
            key="root",
            remedy=f"Name the folder with {name}. Null is for the bundled copy.",
        )
    return path


@lru_cache(maxsize=8)
def read_table(path: Path, separator: str | None = None) -> Tensor:
    """Return the numbers in a gzipped text file, float64 `[rows, columns]`. Cached: do not write into the tensor.

    Args:
        path: of the file, with one row in each line.
        separator: between two numbers; None: white space.
    """
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()  # NumPy would also import bz2 and lzma
    return torch.from_numpy(np.loadtxt(lines, delimiter=separator, ndmin=2))


Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)


def stratified_split(labels: Tensor, split: str, *, val: float = 0.1, test: float = 0.2, seed: int = 0) -> Tensor:
    """Return the indices of one part, sorted.

    The samples of each class are shuffled by `seed`. The first belong to the test part, the next to the val part, the
    rest to the train part. Each part has the same share of each class, rounded.

    Args:
        labels: `[N]`, the class (or bin) of each sample.
        split: which part: `train`, `val` or `test`.
        val: the share of the val part, 0..1.
        test: the share of the test part, 0..1; `val + test` below 1.
        seed: of the order; the global random state is not used.

    Raises:
        UserError: the split is unknown.
    """
    if split not in SPLITS:
        raise UserError(f"cannot be {split!r}", key="split", remedy=f"Use {', '.join(SPLITS)}.")
    generator = torch.Generator().manual_seed(seed)
    parts: list[Tensor] = []
    for label in torch.unique(labels):
        members = (labels == label).nonzero().flatten()
        members = members[torch.randperm(len(members), generator=generator)]
        last_test = round(test * len(members))
        last_val = last_test + round(val * len(members))
        parts.append(
            {"test": members[:last_test], "val": members[last_test:last_val], "train": members[last_val:]}[split]
        )
    return torch.cat(parts).sort().values


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
