"""`python -m hydraloop stop`: end the processes of a sweep or a run on this machine, and all that they have started."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from hydraloop.run_files.checkpoint_files import is_written_with

_POLL = 0.1
"""Seconds between two looks at the processes."""
_DYING = 5.0
"""Seconds that killed processes may take to end."""


def end(
    find: Callable[[], Iterable[int]], seconds: float, waits: Callable[[], object], *, kill: bool = False
) -> tuple[int, int, list[int]]:
    """Send SIGTERM, so that runs save; kill what is left when no process has written a checkpoint for some seconds.

    Ranks and followers have separate sessions, and the children of a process are unknown when it has ended. So all
    descendants are noted while their ancestors are alive.

    Args:
        find: returns the ids of the processes to signal, which are alive. It is called again until none is left.
        waits: called once, if a checkpoint is still being written after `seconds`.
        kill: kill all at once.

    Returns:
        How many processes have ended, how many of them were killed, and the ids of those that could not be ended:
        another user's, or in a system call that does not return.
    """
    told, seen, killed = set[psutil.Process](), set[psutil.Process](), set[psutil.Process]()
    until = patience = time.monotonic() + (0.0 if kill else seconds)
    while True:
        roots = set[psutil.Process]()
        for pid in find():
            with suppress(psutil.Error):
                root = psutil.Process(pid)
                roots.add(root)
                seen |= {root, *root.children(recursive=True)}
        left = {process for process in seen if _is_running(process)}
        if not kill and not killed and any(map(_is_saving, left)):
            until = time.monotonic() + seconds
            if time.monotonic() > patience:
                waits()
                patience = math.inf
        is_late = kill or time.monotonic() > until
        if not left or time.monotonic() > until + _DYING:
            return len(seen - left), len(killed - left), sorted(process.pid for process in left)
        for process in left if is_late else roots - told:
            with suppress(psutil.Error):  # it has ended
                process.kill() if is_late else process.terminate()
        told |= roots
        killed |= left if is_late else set()
        time.sleep(_POLL)


def _is_saving(process: psutil.Process) -> bool:
    """Return whether a process has the unfinished file of a checkpoint open."""
    try:
        return any(is_written_with(Path(file.path)) for file in process.open_files())
    except (psutil.Error, OSError):  # it has ended, or is another user's
        return False


def _is_running(process: psutil.Process) -> bool:
    """Return whether a process has not ended. One that was not waited for has."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
