"""Train loaders that hydraloop has not built: a torch DataLoader, a list, any sized iterable of batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from hydraloop.engine.loaders import Loader, TrainLoader


def as_train_loader(loader: Loader) -> TrainLoader:
    """Return the loader itself if it knows its position, else a `ReadyLoader` of it."""
    return loader if isinstance(loader, TrainLoader) else ReadyLoader(loader)


class ReadyLoader:
    """Begins another loader inside an epoch: at an index of a sequence, at a position of a sampler, or by skipping.

    Args:
        loader: of batches, with a length.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader: Any = loader

    def __len__(self) -> int:
        return len(self._loader)

    def begin(self, first: int, iteration: int) -> Iterable[Any]:
        """Return the batches from index `first` on; see `TrainLoader`."""
        batches: Iterable[Any] = self._loader
        if first == 0:
            return batches
        if first == len(self):
            return ()
        if isinstance(batches, Sequence):
            return islice(batches, first, None)
        set_position = getattr(getattr(self._loader, "sampler", None), "set_position", None)
        if set_position is not None:
            set_position(first * self._loader.batch_size)
            return batches
        return islice(iter(batches), first, None)

    def state_at(self, first: int, iteration: int) -> dict[str, Any] | None:
        """Return None: the batches follow from the epoch; see `TrainLoader`."""
        return None

    def load_state(self, state: dict[str, Any] | None, first: int, iteration: int) -> None:
        """Do nothing; see `TrainLoader`."""
