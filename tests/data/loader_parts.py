"""Data sets and what a loader can be given: as a user writes them, for configs and for ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, SubsetRandomSampler


class Words(Dataset[list[int]]):
    """Lists of 1 to 7 numbers; sample i has `1 + i % 7`."""

    def __init__(self, count: int = 40) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> list[int]:
        return [index] * (1 + index % 7)


def words(count: int = 40) -> list[list[int]]:
    """The same as a list."""
    return [Words(count)[index] for index in range(count)]


def pad(samples: Sequence[list[int]], value: int = -1) -> Tensor:
    """A batch `[N, longest]`."""
    longest = max(map(len, samples))
    return torch.tensor([sample + [value] * (longest - len(sample)) for sample in samples])


class Pad:
    """The same as a class."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __call__(self, samples: Sequence[list[int]]) -> Tensor:
        """A batch `[N, longest]`."""
        return pad(samples, self.value)


def every_second(data: Sequence[Any]) -> SubsetRandomSampler:
    """A function that returns a sampler of the data set."""
    return SubsetRandomSampler(range(0, len(data), 2))


class ByLength:
    """Batches of samples of about the same length, in a random order."""

    def __init__(self, data: Sequence[Sequence[int]], batch_size: int) -> None:
        self.lengths = torch.tensor([len(data[index]) for index in range(len(data))])
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[list[int]]:
        # Random numbers as fractions: samples of the same length are mixed.
        by_length = (self.lengths + torch.rand(len(self.lengths))).argsort()
        batches = by_length.split(self.batch_size)
        for number in torch.randperm(len(batches)):
            yield batches[number].tolist()

    def __len__(self) -> int:
        return -(-len(self.lengths) // self.batch_size)


def count_workers(worker: int, seen: Any = None) -> None:
    """For `worker_init_fn`: the worker's number is the first random number of its samples."""
    torch.manual_seed(100 + worker)


class Epoch:
    """A sized iterable of batches."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(6).split(2))
