"""Worker processes that outlive an epoch, with their copies of the data set: which loaders keep some, and their end."""

from __future__ import annotations

from typing import TypeGuard

from torch.utils.data import DataLoader


def keeps_workers(loader: object) -> TypeGuard[DataLoader[object]]:
    """Whether worker processes outlive an epoch, with copies of the data set as it was when they started."""
    return isinstance(loader, DataLoader) and loader.num_workers > 0 and loader.persistent_workers


def end_workers(loader: object) -> None:
    """End the workers that a loader keeps; its next epoch starts new ones, with copies of the data set as it is then.

    For between two epochs, and for the end of a run: a loader that is left to the garbage collector waits 5 s for each
    of its workers, which it can no longer tell to end. New workers take their seeds from the loader's generator, as the
    first ones did.
    """
    if not keeps_workers(loader):
        return
    iterator, loader._iterator = loader._iterator, None  # torch has no public way; __iter__ makes one where none is
    if iterator is not None:
        iterator._shutdown_workers()  # type: ignore[attr-defined]  # of the kind that has workers
