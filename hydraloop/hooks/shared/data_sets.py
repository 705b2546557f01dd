"""Data sets behind a loader: what they wrap."""

from __future__ import annotations

from typing import Any


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
