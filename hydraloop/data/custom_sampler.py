"""Orders that a sampler draws: the same for the same (seed, epoch), on all ranks and in a resumed run."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch

from hydraloop.data.random_state import mix_seed, private_generators, seed_generators
from hydraloop.errors import UserError

_DRAWS = 2  # separates these seeds from those of the shuffled order and of the workers


class CustomOrder:
    """What a sampler yields in each epoch. Its draws are seeded; the run's generators are neither read nor changed.

    The seeds of torch's (on the CPU), NumPy's and Python's global generators follow from (seed, epoch), and so do those
    of the generators that the sampler has (`generator`). `set_epoch(epoch)` is called first, if the sampler has it.

    Args:
        sampler: yields indices, or lists of indices.
        batched: whether it yields lists of indices.
        samples: of the data set.
        seed: of the run, the same on all ranks.
        key: the option that sets the sampler, for errors.

    Raises:
        UserError: it yields nothing, or something else; or it draws another order for the same seeds.
    """

    def __init__(self, sampler: Iterable[Any], *, batched: bool, samples: int, seed: int, key: str) -> None:
        self.sampler, self.seed, self.key = sampler, seed, key
        self._batched, self._samples = batched, samples
        self._name = sampler.name if isinstance(sampler, _FunctionSampler) else type(sampler).__name__
        self._length = 0  # items in an epoch; 0: not known yet
        first = self(0)
        if not first:
            raise UserError(f"{self._name} yields nothing", key=key, remedy="Check its arguments.")
        if self(0) != first:
            raise UserError(
                f"{self._name} draws another order each time, also with the same seeds, so a run could not be resumed",
                key=key,
                remedy="Let it draw from torch's, NumPy's or Python's global generators, or give it a torch.Generator "
                "named `generator`, or a method set_epoch(epoch) on which the order depends.",
            )
        self._length = len(first)

    def __len__(self) -> int:
        """Return the number of items in an epoch."""
        return self._length

    def __call__(self, epoch: int) -> Any:
        """Return the indices of an epoch (from 0), or its lists of indices.

        Raises:
            UserError: there are more or fewer than in epoch 0, or an item is not an index of the data set.
        """
        seed = mix_seed(self.seed, epoch, _DRAWS)
        part: Any = self.sampler
        while part is not None:  # a batch sampler has a sampler
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(epoch)
            if isinstance(getattr(part, "generator", None), torch.Generator):
                part.generator.manual_seed(seed)
            part = getattr(part, "sampler", None)
        with private_generators(exact=True):
            seed_generators(seed)
            drawn = list(self.sampler)
        try:
            items: Any = [[*map(operator.index, item)] if self._batched else operator.index(item) for item in drawn]
            if self._batched and not all(items):
                raise TypeError("a batch is empty")
        except TypeError as error:
            raise UserError(f"{self._name}: {error}", key=self.key, remedy="Yield indices of the data set.") from error
        flat = [*chain.from_iterable(items)] if self._batched else items
        if flat and not (min(flat) >= 0 and max(flat) < self._samples):
            raise UserError(
                f"{self._name} yields indices from {min(flat)} to {max(flat)}, and there are {self._samples} samples",
                key=self.key,
                remedy="Yield indices of the data set, 0 or more.",
            )
        if self._length and len(items) != self._length:
            raise UserError(
                f"{self._name} yields {len(items)} items in epoch {epoch + 1}, and {self._length} in the first one",
                key=self.key,
                remedy="Yield the same number in each epoch: schedules and limits are computed from it.",
            )
        return items


def create_sampler(sampler: Any, dataset: Any, rank: int, world_size: int, key: str) -> Any:
    """Return the sampler of a data set.

    A function is called for each order. A partial class is called once, with `num_replicas` and `rank` if it takes
    them. Any other object is returned.

    Raises:
        UserError: a class takes `num_replicas` and has no such attribute, which says that it splits an epoch. Or the
            sampler splits an epoch for another number of processes.
    """
    if callable(sampler) and not isinstance(sampler, functools.partial) and not hasattr(sampler, "__iter__"):
        sampler = functools.partial(sampler)
    if isinstance(sampler, functools.partial):
        if not isinstance(sampler.func, type):
            return _FunctionSampler(sampler, dataset)
        takes_ranks = "num_replicas" in inspect.signature(sampler.func).parameters
        sampler = sampler(dataset, num_replicas=world_size, rank=rank) if takes_ranks else sampler(dataset)
        if takes_ranks and not hasattr(sampler, "num_replicas"):
            raise UserError(
                f"{type(sampler).__name__} takes num_replicas, but has no attribute num_replicas",
                key=key,
                remedy="Add to its __init__: self.num_replicas = num_replicas. Then the epoch is not split again.",
            )
    processes = getattr(sampler, "num_replicas", world_size)
    if processes != world_size:
        raise UserError(
            f"{type(sampler).__name__} splits an epoch for {processes} processes, and there are {world_size}",
            key=key,
            remedy="Set _partial_: true and leave num_replicas and rank out: they are then given to the class.",
        )
    return sampler


class _FunctionSampler:
    """Calls a function of the data set for each iteration."""

    def __init__(self, function: functools.partial[Iterable[Any]], dataset: Any) -> None:
        self._function, self._dataset = function, dataset
        self.name: str = getattr(function.func, "__name__", type(function.func).__name__)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._function(self._dataset))
