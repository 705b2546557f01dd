"""Streams for tests, and a loader of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from hydraloop.data.stream_loader import StreamLoader, TrainStreamLoader
from hydraloop.data.stream_worker import StreamPlace
from hydraloop.engine.distributed.comm import Distributed


class Numbers:
    """A generator class: 0 .. n - 1 in an order of its pass, with noise from the three generators. No state."""

    def __init__(self, samples: int = 23) -> None:
        self.samples = samples
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        order = list(range(self.samples))
        random.shuffle(order)
        for number in order:
            noise = torch.rand(()).item() + random.random() + float(np.random.rand())
            yield {"x": number + 100 * self.epoch, "noise": noise}


class Buffered(Numbers):
    """As `Numbers`, in order, through a shuffle buffer that draws for each sample."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        buffer: list[int] = []
        for number in range(self.samples):
            buffer.append(number)
            if len(buffer) == 5:
                yield {"x": buffer.pop(random.randrange(5)) + 100 * self.epoch, "noise": 0.0}
        yield from ({"x": number + 100 * self.epoch, "noise": 0.0} for number in buffer)


class Shards(IterableDataset[dict[str, Any]]):
    """Shards of unequal lengths, with a state, split by the shards."""

    def __init__(self, lengths: tuple[int, ...] = (5, 2, 7, 3)) -> None:
        self.shards = [[100 * shard + number for number in range(length)] for shard, length in enumerate(lengths)]
        self._state, self._start = {"read": 0}, 0

    def split(self, index: int, count: int) -> Shards:
        part = Shards(())
        part.shards = self.shards[index::count]
        return part

    def state_dict(self) -> dict[str, int]:
        return self._state  # which changes with the next sample

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._start = state["read"]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        samples = [number for shard in self.shards for number in shard]
        self._state["read"], self._start = self._start, 0
        while self._state["read"] < len(samples):
            self._state["read"] += 1
            yield {"x": samples[self._state["read"] - 1], "noise": torch.rand(()).item()}


class Plain(IterableDataset[int]):
    """0 .. n - 1, without a word about workers."""

    def __init__(self, samples: int = 10) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.samples))


class ByWorker(Plain):
    """Splits itself between the workers, as torch's documentation shows it."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(self.samples)[info.id :: info.num_workers] if info else range(self.samples))


class Sized(Plain):
    """0 .. n - 1, with a length."""

    def __len__(self) -> int:
        return self.samples


class Indexed:
    """0 .. n - 1, with indices."""

    def __init__(self, samples: int = 10) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return index


class Odd:
    """Tensors `[1]`, and one of another shape."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(10):
            yield torch.full((2 if number == self.at else 1,), float(number))


class Points:
    """Points `[2]` on three rings, without an end."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        while True:
            label = int(torch.randint(3, ()))
            yield torch.nn.functional.normalize(torch.randn(2), dim=0) * (1 + label), label


_DEFAULTS = {
    "batch_size": 3,
    "num_workers": 0,
    "pin_memory": "auto",
    "drop_last": False,
    "prefetch_factor": None,
    "timeout": 0,
    "collate_fn": None,
    "sampler": None,
    "batch_sampler": None,
    "worker_init_fn": None,
    "multiprocessing_context": None,
    "steps_per_epoch": None,
    "skip_on_resume": False,
    "split_stream": None,
}


def stream_loader(
    dataset: Any, *, train: bool, rank: int = 0, world_size: int = 1, seed: int = 0, **options: Any
) -> StreamLoader:
    """A loader of a stream, with the defaults of the options, and batches of 3."""
    ranks = Distributed()
    ranks.rank, ranks.world_size = rank, world_size
    keys = {name: f"data.loader.{name}" for name in _DEFAULTS}
    place = StreamPlace(ranks, seed, None, "data.train" if train else "data.val", keys)
    return (TrainStreamLoader if train else StreamLoader)(dataset, {**_DEFAULTS, **options}, place)
