"""Find the data sets of a loader, through wrappers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def data_sets_with(attribute: str, loader: object, *, outermost: bool = False) -> list[Any]:
    """Return the data sets of a loader that have the attribute (and not as None), from the outside in.

    Data sets that wrap another one (`dataset`, as torch's Subset) or several (`datasets`, as ConcatDataset) are
    searched too. A loader without a data set, such as a list of batches, has none.

    Args:
        attribute: name of a method or value.
        loader: any object, a mapping of them (several data sets), or None.
        outermost: leave out data sets inside one that has the attribute.
    """
    found: list[Any] = []
    seen: set[int] = set()
    loaders = loader.values() if isinstance(loader, Mapping) else [loader]
    waiting = [getattr(each, "dataset", None) for each in loaders]  # classes of users: any type
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
