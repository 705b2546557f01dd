"""Data sets behind a loader: what they wrap, and the copies that worker processes have of them."""

from __future__ import annotations

from typing import Any, TypeGuard

from torch.utils.data import DataLoader


def data_sets_with(attribute: str, loader: object, *, outermost: bool = False) -> list[Any]:
    """The data sets behind a loader that have the attribute (and not as None), from the outside in.

    What wraps another data set (`dataset`, as torch's Subset has) or several (`datasets`, as ConcatDataset) is looked
    through. A loader without a data set, such as a list of batches, has none.

    Args:
        attribute: a method, usually.
        loader: anything, None included.
        outermost: leave out what is inside of one that has it.
    """
    found: list[Any] = []
    seen: set[int] = set()
    waiting = [getattr(loader, "dataset", None)]  # of the user's own kinds: attributes are all that is known of them
    while waiting:
        data = waiting.pop(0)
        if data is None or id(data) in seen:
            continue
        seen.add(id(data))
        has_it = getattr(data, attribute, None) is not None
        if has_it:
            found.append(data)
        if not (has_it and outermost):
            inside = getattr(data, "datasets", None)
            waiting += [getattr(data, "dataset", None), *(inside if isinstance(inside, list | tuple) else ())]
    return found


def keeps_workers(loader: object) -> TypeGuard[DataLoader[Any]]:
    """Whether worker processes outlive an epoch, with copies of the data set as it was when they started."""
    return isinstance(loader, DataLoader) and loader.num_workers > 0 and loader.persistent_workers


def restart_workers(loader: object) -> None:
    """Let the next epoch start new workers, with copies of the data set as it is then; for between two epochs.

    Only persistent workers need it: all others start with each epoch. The old ones end at once. New ones take their
    seeds from the loader's generator, as the first ones did.
    """
    if keeps_workers(loader):
        loader._iterator = None  # torch has no public way; its __iter__ makes a new one where there is none
