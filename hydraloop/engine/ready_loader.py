"""Train loaders that hydraloop has not built: a torch DataLoader, a list, any sized iterable of batches."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from hydraloop.engine.device import seeding
from hydraloop.engine.loaders import Loader, TrainLoader, keeps_workers
from hydraloop.errors import UserError

log = logging.getLogger(__name__)

_REPEATABLE = (SequentialSampler, RandomSampler, WeightedRandomSampler, SubsetRandomSampler)
"""torch's samplers, which draw a whole order at the start of an epoch. A subclass may draw at another time."""


def as_train_loader(loader: Loader) -> TrainLoader:
    """Return the loader itself if it knows its position, else a `ResumableLoader` of it."""
    return loader if isinstance(loader, TrainLoader) else ResumableLoader(loader)


class ResumableLoader:
    """Begins another loader inside an epoch, with the batches that follow in the order of that epoch.

    A sequence begins at an index. A loader with `state_dict` and `load_state_dict` keeps its own position. For any
    other loader, checkpoints keep the states of torch's generators at the start of the epoch; a resumed run restores
    them, loads the epoch again and leaves out the first batches. This is exact for torch's own samplers and for one
    with `set_epoch`. A loader with any other order cannot be resumed inside an epoch.

    Args:
        loader: of batches, with a length.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader: Any = loader
        self._order: Any = _order_of(loader)
        self._has_state = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        batch_sampler = getattr(loader, "batch_sampler", None)
        parts = (loader, self._order, batch_sampler, getattr(batch_sampler, "sampler", None))
        found = (getattr(part, "generator", None) for part in parts)
        self._own = list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())
        self._started: list[torch.Tensor] | None = None  # the generators' states at the start of this epoch
        self._state: Any = None  # of the loader, to be loaded when the epoch begins

    def __len__(self) -> int:
        return len(self._loader)

    def begin(self, first: int, iteration: int) -> Iterable[Any]:
        """Return the batches from index `first` on; see `TrainLoader`."""
        loader = self._loader
        if first == 0:
            self._started = self._generators()
            if keeps_workers(loader) and loader._iterator is not None:
                # torch draws a seed for new workers, before the order; kept ones have none to draw.
                torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
            return loader  # type: ignore[no-any-return]  # any loader of the user
        if isinstance(loader, Sequence):
            return islice(loader, first, None)
        if self._has_state and first == len(self):
            return ()
        return self._rest(first)

    def state_at(self, first: int, iteration: int) -> dict[str, Any] | None:
        """Return the loader's own state, or the generators' states at the start of the epoch; see `TrainLoader`."""
        if isinstance(self._loader, Sequence):
            return None
        if first == 0 or (self._has_state and first == len(self)):
            return {"generators": self._generators()} if self._own else None
        if self._has_state:
            return {"loader": self._loader.state_dict()}
        return {"generators": self._started}

    def load_state(self, state: dict[str, Any] | None, first: int, iteration: int) -> None:
        """Restore a position; see `TrainLoader`."""
        state = state or {}
        generators: list[torch.Tensor] = state.get("generators") or []
        of_this = len(generators) == 1 + len(self._own)  # otherwise they are of another loader
        if 0 < first < len(self) and not isinstance(self._loader, Sequence):
            self._check(saved="loader" in state if self._has_state else of_this)
        if iteration > first and keeps_workers(self._loader) and not self._has_state:
            log.warning(
                "data.train: after a resume, its persistent workers draw other random numbers; in a run with "
                "persistent_workers=False, they are the same"
            )
        self._state = state.get("loader") if self._has_state else None
        if of_this:
            self._started = generators
            if first == 0 or self._has_state:
                self._restore_own(generators)

    def _check(self, *, saved: bool) -> None:
        """Refuse to continue inside an epoch if the order cannot be reproduced.

        Args:
            saved: whether the checkpoint has a state of this loader.
        """
        order, name = self._order, type(self._loader).__name__
        if not self._has_state and (type(order) is SequentialSampler or hasattr(order, "set_epoch")):
            return
        repeatable = self._has_state or type(order) in _REPEATABLE
        if repeatable and saved:
            return
        why, remedy = "the checkpoint does not have its state", "Resume from the end of an epoch"
        if not repeatable:
            why = "it may draw another order than that of the saved run"
            remedy = "Give it a method set_epoch(epoch) on which its order depends, resume from the end of an epoch"
        raise UserError(
            f"{name if order is self._loader else f'{name} with {type(order).__name__}'} cannot continue inside an "
            f"epoch: {why}",
            key="data.train",
            remedy=f"{remedy}, or set resume_strict=false to continue with other batches.",
        )

    def _generators(self) -> list[torch.Tensor]:
        return [torch.get_rng_state(), *(own.get_state() for own in self._own)]

    def _restore_own(self, generators: list[torch.Tensor]) -> None:
        for own, state in zip(self._own, generators[1:], strict=True):
            own.set_state(state)

    def _rest(self, first: int) -> Iterable[Any]:
        """Return the rest of the epoch: from the loader's own state, or drawn again. The run's generators stay."""
        now = seeding.rng_state()
        if self._state is not None:
            self._loader.load_state_dict(self._state)
            self._state = None
        elif not self._has_state and self._started is not None:
            torch.set_rng_state(self._started[0])
            self._restore_own(self._started)
        batches: Iterable[Any] = iter(self._loader)
        for _ in islice(batches, 0 if self._has_state else first):
            pass
        seeding.set_rng_state(now)
        return batches


def check_ranks(loader: Loader, world_size: int) -> None:
    """Refuse a DataLoader with which all ranks would train on the same samples, or on unrelated ones.

    Raises:
        UserError: there are several ranks, and its sampler does not split an epoch between them.
    """
    if world_size == 1 or isinstance(loader, TrainLoader) or not isinstance(loader, DataLoader):
        return
    order = _order_of(loader)
    if not (hasattr(order, "num_replicas") or hasattr(loader.batch_sampler, "num_replicas")):
        raise UserError(
            f"DataLoader with {type(order).__name__} does not split an epoch between {world_size} processes",
            key="data.train",
            remedy="Give it a sampler with num_replicas (torch's DistributedSampler), or set data.train to the set.",
        )


def _order_of(loader: Any) -> Any:
    """Return what defines the order of a loader: its sampler, its batch sampler, or itself."""
    samplers = (getattr(loader, name, None) for name in ("batch_sampler", "sampler"))
    order = next((sampler for sampler in samplers if sampler is not None), loader)
    return order.sampler if type(order) is BatchSampler else order
