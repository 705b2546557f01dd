"""Orders that a sampler draws: the same for the same (seed, epoch), on all ranks and in a resumed run."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Sized
from typing import Any

import torch

from hydraloop.engine.device.seeding import mix_seed, seeded
from hydraloop.errors import UserError

_DRAWS = 2  # separates these seeds from those of the shuffled order and of the workers


class CustomOrder:
    """What a sampler yields in each epoch. Its draws are seeded; the run's generators are neither read nor changed.

    The seeds of torch's, NumPy's and Python's global generators follow from (seed, epoch), and so do those of the
    generators that the sampler has (`generator`). `set_epoch(epoch)` is called first, if the sampler has it.

    Args:
        sampler: yields `len(sampler)` indices, or lists of indices, in each epoch.
        batched: whether it yields lists of indices.
        seed: of the run, the same on all ranks.
    """

    def __init__(self, sampler: Any, *, batched: bool, seed: int) -> None:
        self.sampler, self.seed, self._batched = sampler, seed, batched

    def __len__(self) -> int:
        """Return the number of items in an epoch."""
        return len(self.sampler)

    def __call__(self, epoch: int) -> list[Any]:
        """Return the indices of an epoch (from 0), or its lists of indices."""
        seed = mix_seed(self.seed, epoch, _DRAWS)
        part: Any = self.sampler
        while part is not None:  # a batch sampler has a sampler
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(epoch)
            if isinstance(getattr(part, "generator", None), torch.Generator):
                part.generator.manual_seed(seed)
            part = getattr(part, "sampler", None)
        with seeded(seed):
            drawn = list(self.sampler)
        return [[*map(operator.index, item)] if self._batched else operator.index(item) for item in drawn]


def create_sampler(sampler: Any, dataset: Any, rank: int, world_size: int, key: str) -> tuple[Any, bool]:
    """Return the sampler of a data set, and whether it splits an epoch between the ranks itself.

    A partial is called with the data set, and with `num_replicas` and `rank` if it takes them.

    Raises:
        UserError: the sampler has no length, or splits an epoch for another number of processes.
    """
    takes_ranks = False
    if isinstance(sampler, functools.partial):
        takes_ranks = "num_replicas" in inspect.signature(sampler.func).parameters
        sampler = sampler(dataset, num_replicas=world_size, rank=rank) if takes_ranks else sampler(dataset)
    name, processes = type(sampler).__name__, getattr(sampler, "num_replicas", world_size)
    if sampler is not None and not isinstance(sampler, Sized):
        raise UserError(f"{name} has no length", key=key, remedy="Give it a method __len__.")
    if processes != world_size:
        raise UserError(
            f"{name} splits an epoch for {processes} processes, and there are {world_size}",
            key=key,
            remedy="Set _partial_: true and leave num_replicas and rank out: they are then given to the class.",
        )
    return sampler, takes_ranks or hasattr(sampler, "num_replicas")
