"""The order of an epoch, which depends only on (seed, epoch), and each rank's part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from hydraloop.data.custom_sampler import CustomOrder


_AHEAD = 64  # batches whose seeds are computed at once: 1 µs a batch instead of 20


class BatchRequest(NamedTuple):
    """A batch to be loaded, in a worker or in the training process. Draws are seeded by it."""

    indices: list[int]
    """Of this rank's samples in the data set."""
    epoch: int | None
    """From 0. None: `set_epoch` of the loader has not been called, as for an evaluation; draws are those of epoch 0."""
    number: int
    """Position of the first sample in the epoch, which has the samples of all ranks; the others follow it."""
    seeds: list[int] | None = None
    """The seed of each sample, from which its draws follow. None: `SeededFetcher` computes the seeds."""


class EpochOrder:
    """Yields the requests of this rank's batches in an epoch. The number of batches is the same on all ranks."""

    epoch: int | None = None
    """Of the next iteration, from 0; None stands for 0."""
    first = 0
    """The batch at which the next iteration begins."""
    seeds: Callable[[list[BatchRequest]], list[int]] | None = None
    """Returns the seeds of all samples of the requests. None: requests have no seeds."""

    def __iter__(self) -> Iterator[BatchRequest]:
        epoch = self.epoch
        requests = (self.request(batch_idx, epoch) for batch_idx in range(self.first, len(self)))
        return requests if self.seeds is None else _with_seeds(requests, self.seeds)

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        raise NotImplementedError

    def request(self, batch_idx: int, epoch: int | None) -> BatchRequest:
        """Return the request of a batch, or of a filler.

        Args:
            batch_idx: number of the batch in the epoch, from 0.
            epoch: from 0; None stands for 0.

        Raises:
            IndexError: an epoch has no such batch.
        """
        raise NotImplementedError

    def samples_at(self, batch_idx: int) -> tuple[int, int]:
        """Return the number of samples that count in a batch, as (on this rank, on all ranks); (0, n) for a filler.

        Args:
            batch_idx: number of the batch in the epoch, from 0.

        Raises:
            IndexError: an epoch has no such batch.
        """
        raise NotImplementedError


def _with_seeds(
    requests: Iterator[BatchRequest], seeds: Callable[[list[BatchRequest]], list[int]]
) -> Iterator[BatchRequest]:
    """Yield the requests with the seeds of their samples, which are computed for several batches at once."""
    while ahead := list(islice(requests, _AHEAD)):
        of_all, begin = seeds(ahead), 0
        for indices, epoch, number, _ in ahead:
            end = begin + len(indices)
            yield BatchRequest(indices, epoch, number, of_all[begin:end])
            begin = end


class EpochSampler(EpochOrder):
    """The order of a data set: all samples once, shuffled by (seed, epoch) or in the order of the data set.

    The global random state is neither read nor changed, so a resumed run has the same order as one without a stop.

    All ranks compute the same order, and each has its part. Global batch g is `order[g * G : (g + 1) * G]`, for a batch
    size of G. Of its n samples, each of the W ranks has n // W, and the first n % W ranks have one more. So the batches
    of all ranks, joined in rank order, are those of one process, for any number of ranks.

    A rank without a share in a global batch has a filler that does not count (see `samples_at`): the first two samples
    of that batch, or its only one twice, or one sample if no rank has two. There are two because batch norm fails on
    one sample in training.

    A position takes no time to reach: the order of an epoch is computed once, and each request takes its part of it.

    Args:
        data: anything with a length.
        shuffle: compute a new order for each epoch; False: 0, 1, 2, ...
        seed: the run's seed, 0 or more; the same on all ranks.
        batch_size: samples of a global batch, those of all ranks (G), 1 or more.
        drop_last: drop an incomplete last global batch, on all ranks.
        rank: this process's number, 0 .. world_size - 1.
        world_size: number of processes that share the samples (W).
        order: the order of each epoch instead of `data` and `shuffle`; its indices may repeat or be left out.

    Raises:
        ValueError: the batch size or the rank is out of range.
    """

    def __init__(
        self,
        data: Sized,
        *,
        shuffle: bool,
        seed: int = 0,
        batch_size: int = 1,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
        order: CustomOrder[int] | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"a batch of {batch_size} samples")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of {world_size}")
        self.shuffle, self.seed, self.batch_size = shuffle, seed, batch_size
        self.rank, self.world_size = rank, world_size
        self._drawn = order
        self._kept: tuple[int, Any] = -1, None  # the order of an epoch, int64 `[samples]` of NumPy
        self._samples = len(data if order is None else order)
        self._full, rest = divmod(self._samples, batch_size)
        self._rest = 0 if drop_last else rest
        self._full_samples = _share(batch_size, rank, world_size)[1], batch_size
        self._last_samples = _share(self._rest, rank, world_size)[1], self._rest

    def samples_at(self, batch_idx: int) -> tuple[int, int]:
        """See `EpochOrder`."""
        if 0 <= batch_idx < self._full:
            return self._full_samples
        if batch_idx == self._full and self._rest:
            return self._last_samples
        raise IndexError(f"an epoch has no batch {batch_idx}")

    def request(self, batch_idx: int, epoch: int | None) -> BatchRequest:
        """See `EpochOrder`. The order of one epoch is kept; with `shuffle`, another epoch takes time."""
        mine, of_all = self.samples_at(batch_idx)
        whole = batch_idx * self.batch_size
        begin = whole + _share(of_all, self.rank, self.world_size)[0] if mine else whole
        samples = self._order_of(epoch or 0, begin, begin + (mine or min(2, of_all)))
        if not mine:
            samples = (samples * 2)[: min(2, -(-self.batch_size // self.world_size))]
        return BatchRequest(samples, epoch, begin)

    def __len__(self) -> int:
        return self._full + (self._rest > 0)

    def _order_of(self, epoch: int, begin: int, end: int) -> list[int]:
        """Return the samples at the positions from `begin` to `end`, which is not included."""
        if not self.shuffle and self._drawn is None:
            return list(range(begin, end))
        if self._kept[0] != epoch:
            if self._drawn is not None:
                order = torch.tensor(self._drawn(epoch))
            else:
                generator = torch.Generator().manual_seed(mix_seed(self.seed, epoch))
                order = torch.randperm(self._samples, generator=generator)
            self._kept = epoch, order.numpy()
        samples: list[int] = self._kept[1][begin:end].tolist()
        return samples


class EpochBatchSampler(EpochOrder):
    """The order of a batch sampler, which draws the batches of all ranks.

    A global batch has the next `batches` of them. If there are as many ranks, each rank has one; a rank without one in
    the last global batch has a filler that does not count: the first two samples of the global batch, or its only one
    twice. With another number of ranks, their samples are split as those of an `EpochSampler`.

    Args:
        order: the batches of each epoch.
        batches: of a global batch, 1 or more; None: `world_size`.
        rank: this process's number, 0 .. world_size - 1.
        world_size: number of processes that share the batches.
    """

    def __init__(
        self, order: CustomOrder[list[int]], *, batches: int | None = None, rank: int = 0, world_size: int = 1
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.batches = world_size if batches is None else batches
        self._drawn = order
        self._kept: tuple[int, list[tuple[int, list[list[int]]]]] = -1, []

    def samples_at(self, batch_idx: int) -> tuple[int, int]:
        """See `EpochOrder`."""
        _, group = self._group(batch_idx, self.epoch)
        return self._part(group)[1], sum(map(len, group))

    def request(self, batch_idx: int, epoch: int | None) -> BatchRequest:
        """See `EpochOrder`."""
        position, group = self._group(batch_idx, epoch)
        flat = [index for batch in group for index in batch]
        begin, mine = self._part(group)
        if not mine:
            return BatchRequest((flat * 2)[:2], epoch, position)
        return BatchRequest(flat[begin : begin + mine], epoch, position + begin)

    def __len__(self) -> int:
        return -(-len(self._drawn) // self.batches)

    def _part(self, group: list[list[int]]) -> tuple[int, int]:
        """Return where this rank's part of a global batch begins, and its length."""
        if self.batches != self.world_size:
            return _share(sum(map(len, group)), self.rank, self.world_size)
        return sum(map(len, group[: self.rank])), len(group[self.rank]) if self.rank < len(group) else 0

    def _group(self, batch_idx: int, epoch: int | None) -> tuple[int, list[list[int]]]:
        """Return the batches of a global batch, and the position of its first sample in the epoch."""
        if not 0 <= batch_idx < len(self):
            raise IndexError(f"an epoch has no batch {batch_idx}")
        epoch = epoch or 0
        if self._kept[0] != epoch:
            batches, groups, position = self._drawn(epoch), [], 0
            for begin in range(0, len(batches), self.batches):
                group = batches[begin : begin + self.batches]
                groups.append((position, group))
                position += sum(map(len, group))
            self._kept = epoch, groups
        return self._kept[1][batch_idx]


def _share(samples: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return where a rank's share of the samples begins, and its length."""
    each, more = divmod(samples, world_size)
    return rank * each + min(rank, more), each + (rank < more)


def mixed_seeds(mixed: int, *parts: Sequence[int]) -> list[int]:
    """Return a seed for each item: for parts a and b, those of item i are `mix(mixed, a[i], b[i]) >> 32`.

    Computes all seeds at once: 10 µs for 64, instead of 30 µs one by one.
    """
    seeds: Any = np.uint64(mixed)
    for part in parts:
        seeds = seeds + np.array(part, dtype=np.uint64) + _GAMMA
        seeds = (seeds ^ (seeds >> _30)) * _FIRST
        seeds = (seeds ^ (seeds >> _27)) * _SECOND
        seeds ^= seeds >> _31
    of_items: list[int] = (seeds >> _32).tolist()
    return of_items


def mix_seed(*parts: int) -> int:
    """Return a seed (0 .. 2^32 - 1) made of several numbers. Close numbers give unrelated seeds.

    torch's generator on the CPU keeps 32 bits of its seed, so `seed + epoch` would give run 0 the epochs of run 1, and
    `seed << 32` would be lost.
    """
    return mix(0, *parts) >> 32


def mix(mixed: int, *parts: int) -> int:
    """Return 64 bits made of others and of several numbers: `mix_seed(a, b)` is `mix(mix(0, a), b) >> 32`.

    Source: the finaliser of SplitMix64 (G. Steele, D. Lea, C. Flood, 2014).
    """
    for part in parts:
        mixed = (mixed + part + 0x9E3779B97F4A7C15) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        mixed ^= mixed >> 31
    return mixed


_MASK = (1 << 64) - 1
_GAMMA, _FIRST, _SECOND = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], dtype=np.uint64)
_27, _30, _31, _32 = np.array([27, 30, 31, 32], dtype=np.uint64)
