"""Replaces parts of a checkpoint, which is nested in dicts, lists and tuples."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any


def with_replaced(value: Any, replace: Callable[[Any, str], Any], path: str = "") -> Any:
    """Return a copy of the containers, in which other values are replaced; what is replaced is not searched.

    Args:
        replace: called with each value and its path (`optimizer/state/0`); returns the same value to keep it.
    """
    new = replace(value, path)
    if new is not value:
        return new
    if isinstance(value, dict):
        items = copy(value)  # with the attributes of an OrderedDict: `_metadata` of a state dict
        for name, item in value.items():
            items[name] = with_replaced(item, replace, f"{path}/{name}" if path else str(name))
        return items
    if type(value) in (list, tuple):
        return type(value)(with_replaced(item, replace, f"{path}/{number}") for number, item in enumerate(value))
    return value
