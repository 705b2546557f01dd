"""The order of an epoch: a function of (seed, epoch), and nothing else; and each rank's part of it."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch
from torch import Tensor
from torch.utils.data import Sampler


class EpochSampler(Sampler[int]):
    """Goes through all samples once an epoch, shuffled by (seed, epoch) or in their own order.

    The global random state is neither read nor changed, so an epoch has the same order whether the run got there in
    one go or was resumed, and whatever else draws random numbers.

    With several ranks all of them draw the same order, and each yields its own part. With B samples a batch and W
    ranks, global batch g is `order[g * B * W : (g + 1) * B * W]`, and rank r has its r-th run of B samples. The last,
    short one is split evenly and contiguously: of n samples each rank has n // W, the first n % W ranks one more.
    So the ranks' batches, put together in the order of the ranks, are the batches of one process with batch size
    B * W, and every rank has the same number of them. A rank without a share in the last one yields a filler, the first
    two samples of that global batch, or its only one twice (one sample where B is 1), which counts for nothing
    (`samples_at` says so). Two, since normalisation over a batch of one sample is an error in training.

    Args:
        data: anything with a length; it is asked for once, here.
        shuffle: draw the order anew for each epoch; False: 0, 1, 2, ...
        seed: the run's seed, 0 or more; the same on all ranks.
        batch_size: samples a batch on each rank (B), 1 or more. In one process it does not change the order.
        drop_last: leave out a short last global batch, on all ranks.
        rank: this process's number, 0 .. world_size - 1.
        world_size: how many processes share the samples (W).

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

        global_batch = batch_size * world_size
        self._samples = len(data)
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
        """Choose the epoch (from 0) whose order the next iteration gives; until then every iteration is the same."""
        self.epoch = epoch

    def set_position(self, samples: int) -> None:
        """Let the next iteration, and only that one, leave out the first `samples` of this rank's part.

        Args:
            samples: whole batches, so a multiple of the batch size; or all of them. The same on all ranks.

        Raises:
            ValueError: the position is not within the epoch, or inside a batch.
        """
        if not 0 <= samples <= self._length:
            raise ValueError(f"position {samples} is outside of an epoch of {self._length} samples")
        if samples % self.batch_size and samples != self._length:
            raise ValueError(f"position {samples} is inside a batch of {self.batch_size}")
        self._position = samples

    def samples_at(self, batch_idx: int) -> tuple[int, int]:
        """How many samples count in a batch: (of this rank, of all ranks); (0, n) for a filler. No host sync.

        Args:
            batch_idx: the batch's number in the epoch, from 0.

        Raises:
            IndexError: an epoch has no such batch.
        """
        if 0 <= batch_idx < self._full:
            return self._full_samples
        if batch_idx == self._full and self._last_samples[1]:
            return self._last_samples
        raise IndexError(f"an epoch has no batch {batch_idx}")

    def indices_at(self, batch_idx: int, epoch: int) -> list[int]:
        """The indices of this rank's samples in a batch of an epoch, a filler's too; draws the epoch's order anew.

        Args:
            batch_idx: the batch's number in the epoch, from 0.
            epoch: from 0.

        Raises:
            IndexError: an epoch has no such batch.
        """
        self.samples_at(batch_idx)
        begin = batch_idx * self.batch_size
        return self._indices(epoch)[begin : begin + self.batch_size]

    def __len__(self) -> int:
        """The indices of this rank in a whole epoch, whatever the position; a filler is one of them."""
        return self._length

    def __iter__(self) -> Iterator[int]:
        # Not a generator function: the position is taken at the call of iter(), not at the first next().
        position, self._position = self._position, 0
        if self.world_size == 1 and not self.shuffle:
            return iter(range(position, self._length))
        return iter(self._indices(self.epoch)[position:])

    def _indices(self, epoch: int) -> list[int]:
        """This rank's part of an epoch: its run of each full global batch, then its share of the last one."""
        order, world, batch = self._order(epoch), self.world_size, self.batch_size
        indices: list[int]
        if world == 1:
            indices = order[: self._length].tolist()
            return indices
        full = order[: self._full * world * batch].view(self._full, world, batch)
        indices = full[:, self.rank].flatten().tolist()
        return indices + order[self._last].tolist()

    def _order(self, epoch: int) -> Tensor:
        """The whole epoch of all ranks, `[samples]`."""
        if not self.shuffle:
            return torch.arange(self._samples)
        generator = torch.Generator().manual_seed(mix_seed(self.seed, epoch))
        return torch.randperm(self._samples, generator=generator)


def mix_seed(*parts: int) -> int:
    """One seed (0 .. 2^32 - 1) out of several numbers; close numbers give unrelated seeds.

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
