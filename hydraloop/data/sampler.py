"""The order of an epoch, which depends only on (seed, epoch), and each rank's part of it."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.data import Sampler

if TYPE_CHECKING:
    from hydraloop.data.order import Drawn


class EpochSampler(Sampler[int]):
    """Yields this rank's part of an epoch: all samples once, shuffled by (seed, epoch) or in the order of the data set.

    The global random state is neither read nor changed, so a resumed run has the same order as one without a stop.

    All ranks compute the same order, and each yields its part. With B samples per batch and W ranks, global batch g is
    `order[g * B * W : (g + 1) * B * W]`, and rank r has its r-th B samples. An incomplete last global batch is split
    evenly: of n samples, each rank has n // W, the first n % W ranks one more. So the batches of all ranks, joined in
    rank order, are those of one process with batch size B * W, and every rank has the same number of batches.

    A rank without a share in the last global batch yields a filler that does not count (see `samples_at`): the first
    two samples of that batch, or its only one twice, or one sample if B is 1. There are two because batch norm fails
    on one sample in training.

    Args:
        data: anything with a length.
        shuffle: compute a new order for each epoch; False: 0, 1, 2, ...
        seed: the run's seed, 0 or more; the same on all ranks.
        batch_size: samples per batch on each rank (B), 1 or more. In one process it does not change the order.
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
        order: Drawn[int] | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"a batch of {batch_size} samples")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of {world_size}")
        self.shuffle = shuffle
        self.seed = seed
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self._position = 0
        self._drawn = order

        global_batch = batch_size * world_size
        self._samples = len(data if order is None else order)
        self._full, rest = divmod(self._samples, global_batch)
        if drop_last:
            rest = 0
        each, more = divmod(rest, world_size)
        share = each + (rank < more)
        whole = self._full * global_batch
        begin = whole + rank * each + min(rank, more)
        filler = rest > 0 and share == 0
        self._last = list(range(begin, begin + share))
        if filler:
            self._last = [whole, whole + min(1, rest - 1)][:batch_size]
        self._length = self._full * batch_size + len(self._last)
        self._full_samples, self._last_samples = (batch_size, global_batch), (share, rest)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch (from 0) of the next iterations."""
        self.epoch = epoch

    def set_position(self, samples: int) -> None:
        """Skip the first `samples` of this rank's part, in the next iteration only.

        Args:
            samples: a multiple of the batch size, or all of them. The same on all ranks.

        Raises:
            ValueError: the position is not within the epoch, or inside a batch.
        """
        if not 0 <= samples <= self._length:
            raise ValueError(f"position {samples} is outside of an epoch of {self._length} samples")
        if samples % self.batch_size and samples != self._length:
            raise ValueError(f"position {samples} is inside a batch of {self.batch_size}")
        self._position = samples

    def samples_at(self, batch_idx: int) -> tuple[int, int]:
        """Return the number of samples that count in a batch, as (on this rank, on all ranks); (0, n) for a filler.

        Args:
            batch_idx: number of the batch in the epoch, from 0.

        Raises:
            IndexError: an epoch has no such batch.
        """
        if 0 <= batch_idx < self._full:
            return self._full_samples
        if batch_idx == self._full and self._last_samples[1]:
            return self._last_samples
        raise IndexError(f"an epoch has no batch {batch_idx}")

    def indices_at(self, batch_idx: int, epoch: int) -> list[int]:
        """Return the indices of this rank's samples in a batch, or of its filler. Computes the whole order.

        Args:
            batch_idx: number of the batch in the epoch, from 0.
            epoch: from 0.

        Raises:
            IndexError: an epoch has no such batch.
        """
        self.samples_at(batch_idx)
        begin = batch_idx * self.batch_size
        return self._indices(epoch)[begin : begin + self.batch_size]

    @property
    def num_replicas(self) -> int:
        """The number of processes that share the samples; by this name, torch's samplers say that they split them."""
        return self.world_size

    def __len__(self) -> int:
        """Return the number of indices that this rank yields in a whole epoch, including a filler."""
        return self._length

    def __iter__(self) -> Iterator[int]:
        # Not a generator function: the position is taken at the call of iter(), not at the first next().
        position, self._position = self._position, 0
        if self.world_size == 1 and not self.shuffle and self._drawn is None:
            return iter(range(position, self._length))
        return iter(self._indices(self.epoch)[position:])

    def _indices(self, epoch: int) -> list[int]:
        """Return this rank's part of an epoch: its part of each full global batch, then of the last one."""
        order, world, batch = self._order(epoch), self.world_size, self.batch_size
        indices: list[int]
        if world == 1:
            indices = order[: self._length].tolist()
            return indices
        full = order[: self._full * world * batch].view(self._full, world, batch)
        indices = full[:, self.rank].flatten().tolist()
        return indices + order[self._last].tolist()

    def _order(self, epoch: int) -> Tensor:
        """Return the order of the whole epoch, `[samples]`."""
        if self._drawn is not None:
            return torch.tensor(self._drawn(epoch))
        if not self.shuffle:
            return torch.arange(self._samples)
        generator = torch.Generator().manual_seed(mix_seed(self.seed, epoch))
        return torch.randperm(self._samples, generator=generator)


class EpochBatches(Sampler[list[int]]):
    """Yields this rank's batches of an epoch, of those that a batch sampler draws for all ranks.

    Rank r of W has batch r of each W batches. If the last group has fewer, the ranks without a batch get a filler that
    does not count (see `samples_at`): the first two samples of the group, or its only one twice.

    Args:
        order: the batches of each epoch.
        rank: this process's number, 0 .. world_size - 1.
        world_size: number of processes that share the batches (W).
    """

    def __init__(self, order: Drawn[list[int]], *, rank: int = 0, world_size: int = 1) -> None:
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self._position = 0
        self._drawn = order
        self._length = -(-len(order) // world_size)
        self._last: tuple[int, list[list[list[int]]]] = (-1, [])

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch (from 0) of the next iterations."""
        self.epoch = epoch

    def set_position(self, batches: int) -> None:
        """Skip the first batches of this rank's part, in the next iteration only."""
        self._position = batches

    def samples_at(self, batch_idx: int) -> tuple[int, int]:
        """Return the number of samples that count in a batch; see `EpochSampler.samples_at`."""
        if not 0 <= batch_idx < self._length:
            raise IndexError(f"an epoch has no batch {batch_idx}")
        group = self._groups(self.epoch)[batch_idx]
        return len(group[self.rank]) if self.rank < len(group) else 0, sum(map(len, group))

    def indices_at(self, batch_idx: int, epoch: int) -> list[int]:
        """Return the indices of this rank's samples in a batch, or of its filler. Computes the whole order."""
        if not 0 <= batch_idx < self._length:
            raise IndexError(f"an epoch has no batch {batch_idx}")
        return self._batches(epoch)[batch_idx]

    def __len__(self) -> int:
        """Return the number of batches that this rank yields in a whole epoch, including a filler."""
        return self._length

    def __iter__(self) -> Iterator[list[int]]:
        # A generator function: with workers, torch calls iter() twice and uses the second iterator.
        position, self._position = self._position, 0
        yield from self._batches(self.epoch)[position:]

    def _batches(self, epoch: int) -> list[list[int]]:
        rank = self.rank
        return [group[rank] if rank < len(group) else (group[0] * 2)[:2] for group in self._groups(epoch)]

    def _groups(self, epoch: int) -> list[list[list[int]]]:
        """Return the batches of all ranks, for each number of a batch. Those of one epoch are kept."""
        if self._last[0] != epoch:
            batches, world = self._drawn(epoch), self.world_size
            self._last = epoch, [batches[begin : begin + world] for begin in range(0, len(batches), world)]
        return self._last[1]


def mix_seed(*parts: int) -> int:
    """Return a seed (0 .. 2^32 - 1) made of several numbers. Close numbers give unrelated seeds.

    torch's generator on the CPU keeps 32 bits of its seed, so `seed + epoch` would give run 0 the epochs of run 1, and
    `seed << 32` would be lost. Source: the finaliser of SplitMix64 (G. Steele, D. Lea, C. Flood, 2014).
    """
    mixed = 0
    for part in parts:
        mixed = (mixed + part + 0x9E3779B97F4A7C15) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        mixed ^= mixed >> 31
    return mixed >> 32


_MASK = (1 << 64) - 1
