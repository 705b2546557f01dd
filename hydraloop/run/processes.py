"""Whether a process is still the one it was, on this machine. Does not import torch."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

import psutil

_SAME = 2.0
"""Seconds; the machine's start is known to a second."""


def started(pid: int) -> float | None:
    """Return the seconds from the machine's start to a process's; None if there is no such process.

    They do not change when the clock is set.
    """
    try:
        return float(psutil.Process(pid).create_time() - psutil.boot_time())
    except psutil.Error:
        return None


def is_alive(pid: int, since: float | None) -> bool:
    """Whether the process that had an id then has it still. One that has ended and was not waited for is not alive.

    Args:
        since: what `started` returned for it.
    """
    now = started(pid)
    return now is not None and since is not None and abs(now - since) < _SAME and not _is_zombie(pid)


def _is_zombie(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return True


def machine() -> str:
    """Name the place where a process id means one process: the host, since its start, and the container."""
    names = [socket.gethostname()]
    with suppress(OSError):
        names.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
    with suppress(OSError):
        names.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(names)
