"""Orders that a sampler draws: the same for the same (seed, epoch), on all ranks and in a resumed run."""

from __future__ import annotations

import functools
import operator
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


def create_sampler(sampler: Any, dataset: Any, key: str) -> Any:
    """Return the sampler of a data set; a partial is called with the data set.

    Raises:
        UserError: the sampler splits an epoch between processes, as the loader does.
    """
    if isinstance(sampler, functools.partial):
        sampler = sampler(dataset)
    if any(hasattr(part, "num_replicas") for part in (sampler, getattr(sampler, "sampler", None))):
        raise UserError(
            f"{type(sampler).__name__} splits an epoch between processes, and the loader splits it again",
            key=key,
            remedy="Leave it out: by default, an epoch is shuffled by the seed, and each process has its part.",
        )
    return sampler
