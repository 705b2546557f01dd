"""One follower a tracker and run: a lock that its process holds while it lives."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from filelock import FileLock

log = logging.getLogger(__name__)

FOLDER = "tracking"
"""In a run directory: what trackers know of the run."""
_PATIENCE = 15.0
"""Seconds to wait for the followers of a process that has gone: they end `flush_timeout` (10 s) after it."""


def lock_of(run_dir: Path, name: str) -> FileLock:
    """The lock of the follower of a tracker hook; let go of by the system when the process ends, however it does."""
    from filelock import FileLock  # here: the command line needs nothing of it before there is a run

    return FileLock(run_dir / FOLDER / f"{name}.lock")


def ended(run_dir: Path) -> bool:
    """Wait for followers that an earlier process has left. Returns whether all have ended."""
    from filelock import Timeout

    for path in sorted((run_dir / FOLDER).glob("*.lock")):
        try:
            with lock_of(run_dir, path.stem).acquire(timeout=_PATIENCE):
                pass
        except Timeout:
            log.warning("%s: a follower of an earlier process is still busy", path.stem)
            return False
    return True
