"""Train loaders that hydraloop has not built: a torch DataLoader, a list, any sized iterable of batches."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from hydraloop.engine import seeding
from hydraloop.engine.loaders import Loader, TrainLoader, epoch_setters
from hydraloop.engine.signals import leave_deaths_to_the_loader
from hydraloop.errors import UserError

log = logging.getLogger(__name__)


def as_train_loader(loader: Loader) -> TrainLoader:
    """Return the loader itself if it knows its position, else a `ResumableLoader` of it."""
    return loader if isinstance(loader, TrainLoader) else ResumableLoader(loader)


class ResumableLoader:
    """Begins another loader inside an epoch.

    A sequence begins at an index. A loader with `state_dict` and `load_state_dict` keeps its own position. Any other
    loader is read from the start of the epoch, and the first batches are left out. If its order does not follow from
    `set_epoch` of the loader or its sampler, the rest of the epoch has another order, and a warning says so.

    Args:
        loader: of batches, with a length.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader: Any = loader
        self._has_state = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._state: Any = None  # of the loader, to be loaded when the epoch begins

    def __len__(self) -> int:
        return len(self._loader)

    def begin(self, first: int, iteration: int) -> Iterable[Any]:
        """Return the batches from index `first` on; see `TrainLoader`."""
        loader = self._loader
        if first == 0:
            return loader  # type: ignore[no-any-return]  # any loader of the user
        if first == len(self):
            return ()
        if isinstance(loader, Sequence):
            return islice(loader, first, None)
        return self._rest(first)

    def state_at(self, first: int, iteration: int) -> dict[str, Any] | None:
        """Return the loader's own state inside an epoch; see `TrainLoader`."""
        return {"loader": self._loader.state_dict()} if self._has_state and 0 < first < len(self) else None

    def load_state(self, state: dict[str, Any] | None, first: int, iteration: int) -> None:
        """Restore a position; see `TrainLoader`."""
        self._state = (state or {}).get("loader") if self._has_state else None
        order = _order_of(self._loader)
        ordered = isinstance(self._loader, Sequence) or epoch_setters(self._loader) or type(order) is SequentialSampler
        if 0 < first < len(self) and self._state is None and not ordered:
            log.warning(
                "data.train: the rest of this epoch has another order, so some samples are repeated and others left "
                "out: %s has neither set_epoch nor a state in the checkpoint",
                type(order).__name__,
            )

    def _rest(self, first: int) -> Iterable[Any]:
        """Return the rest of the epoch. The run's generators keep their states."""
        now = seeding.rng_state()
        left_out = first
        if self._state is not None:
            self._loader.load_state_dict(self._state)
            self._state, left_out = None, 0
        leave_deaths_to_the_loader()
        batches: Iterable[Any] = iter(self._loader)
        for _ in islice(batches, left_out):
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
