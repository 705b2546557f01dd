"""Whether a process is still the one it was. Without torch."""

from __future__ import annotations

import psutil

_SAME = 2.0
"""Seconds; the machine's start is known to a second."""


def started(pid: int) -> float | None:
    """Seconds from the machine's start to a process's, however its clock is set later; None where there is none."""
    try:
        return float(psutil.Process(pid).create_time() - psutil.boot_time())
    except psutil.Error:
        return None


def is_alive(pid: int, since: float | None) -> bool:
    """Whether the process that had a number then has it still.

    Args:
        since: what `started` said of it.
    """
    now = started(pid)
    return now is not None and since is not None and abs(now - since) < _SAME
