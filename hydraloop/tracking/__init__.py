"""Sends a run's records to tracking services. Does not import torch.

The `logger` hook appends records to `metrics.jsonl`, which is the source of truth. Each tracker hook starts a sender:
a separate process that reads new lines and sends them. A service that is slow or unreachable does not slow training.

A custom tracker is a subclass of `Tracker`, and of `TrackerHook` with the path of that class as its `kind`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hydraloop.files.metrics_log import LoggedObject, Record
from hydraloop.tracking.tracker import (
    BusyError,
    Finish,
    GoneError,
    LostError,
    RefusedError,
    Run,
    Tracker,
    UnusableError,
)

if TYPE_CHECKING:
    from hydraloop.tracking.tracker_hook import TrackerHook as TrackerHook

__all__ = [
    "BusyError",
    "Finish",
    "GoneError",
    "LoggedObject",
    "LostError",
    "Record",
    "RefusedError",
    "Run",
    "Tracker",
    "TrackerHook",
    "UnusableError",
]


def __getattr__(name: str) -> Any:
    if name == "TrackerHook":  # senders do not need it
        from hydraloop.tracking.tracker_hook import TrackerHook

        return TrackerHook
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
