"""The order of an epoch: a function of (seed, epoch), and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler


class EpochSampler(Sampler[int]):
    """Goes through all samples once an epoch, shuffled by (seed, epoch) or in their own order.

    The global random state is neither read nor changed, so an epoch has the same order whether the run got there in
    one go or was resumed, and whatever else draws random numbers.

    Args:
        data: anything with a length.
        shuffle: draw the order anew for each epoch; False: 0, 1, 2, ...
        seed: the run's seed, 0 or more.
    """

    def __init__(self, data: Sized, *, shuffle: bool, seed: int = 0) -> None:
        self.data = data
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self._position = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch (from 0) whose order the next iteration gives; until then every iteration is the same."""
        self.epoch = epoch

    def set_position(self, samples: int) -> None:
        """Let the next iteration, and only that one, leave out the first `samples` of its order.

        Raises:
            ValueError: the position is not within the epoch.
        """
        if not 0 <= samples <= len(self.data):
            raise ValueError(f"position {samples} is outside of an epoch of {len(self.data)} samples")
        self._position = samples

    def __len__(self) -> int:
        """The samples of a whole epoch, whatever the position."""
        return len(self.data)

    def __iter__(self) -> Iterator[int]:
        # Not a generator function: the position is taken at the call of iter(), not at the first next().
        position, self._position = self._position, 0
        return iter(self._order()[position:])

    def _order(self) -> list[int]:
        """The whole epoch. A part for each rank would be cut out of it here."""
        if not self.shuffle:
            return list(range(len(self.data)))
        generator = torch.Generator().manual_seed(mix_seed(self.seed, self.epoch))
        order: list[int] = torch.randperm(len(self.data), generator=generator).tolist()
        return order


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
