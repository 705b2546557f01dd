"""Decide from the name of a metric whether high or low values are good. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

GREATER_KEYS: tuple[str, ...] = ("acc", "top", "AR@", "auc", "precision", "mAP", "mDice", "mIoU", "mAcc", "aAcc")
"""Names, or parts of names, of metrics whose high values are good, as in mmengine's CheckpointHook."""
LESS_KEYS: tuple[str, ...] = ("loss",)
"""The same for low values."""


def by_keys(name: str, greater: Iterable[str] = GREATER_KEYS, less: Iterable[str] = LESS_KEYS) -> bool | None:
    """Return whether high values are good; None if the name is not in the lists. An exact match counts first."""
    name, greater, less = name.lower(), [key.lower() for key in greater], [key.lower() for key in less]
    if name in greater or name in less:
        return name in greater
    if any(key in name for key in greater):
        return True
    return False if any(key in name for key in less) else None
