"""One follower a tracker and run: a lock that its process holds while it lives."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from filelock import FileLock

log = logging.getLogger(__name__)

FOLDER = "tracking"
"""In a run directory: what trackers know of the run."""
PATIENCE = 15.0
"""Seconds to wait for the follower of a process that has gone: longer than it has by default for the rest."""
BUSY = "another process is sending this run's records"


def lock_of(run_dir: Path, name: str) -> FileLock:
    """The lock of the follower of a tracker hook; let go of by the system when the process ends, however it does."""
    from filelock import FileLock  # here: the command line needs nothing of it before there is a run

    return FileLock(run_dir / FOLDER / f"{name}.lock")


def ended(run_dir: Path) -> bool:
    """Wait for followers that an earlier process has left, and end those that hang. Returns whether all have ended."""
    found = [_ended(run_dir, path.stem) for path in sorted((run_dir / FOLDER).glob("*.lock"))]
    return all(found)


def _ended(run_dir: Path, name: str) -> bool:
    if _is_free(run_dir, name, 0.0):
        return True
    log.info("%s: waiting for the follower of an earlier process", name)
    if _is_free(run_dir, name, _patience(run_dir, name)):
        return True
    end_orphans(run_dir, name, os.getpid())
    if _is_free(run_dir, name, 1.0):
        return True
    log.warning("%s: %s", name, BUSY)
    return False


def _is_free(run_dir: Path, name: str, seconds: float) -> bool:
    from filelock import Timeout

    try:
        with lock_of(run_dir, name).acquire(timeout=seconds):
            return True
    except Timeout:
        return False


def _patience(run_dir: Path, name: str) -> float:
    """It has its `flush_timeout`, which may be an hour; the one that comes goes on where it stood."""
    from hydraloop.tracking.follower.cursor import Cursor

    cursor = Cursor.load(run_dir, name)
    given = PATIENCE if cursor is None else float(cursor.options.get("flush_timeout", PATIENCE))
    return min(given + 2.0, PATIENCE)


def end_orphans(run_dir: Path, name: str, training: int) -> None:
    """End followers on this machine whose training process has gone: one that hangs would keep the lock for ever.

    Args:
        run_dir: that they follow.
        name: of the tracker hook.
        training: id of the process that trains now.
    """
    import psutil

    from hydraloop.run.processes import is_alive
    from hydraloop.tracking import description

    run = description.read(run_dir)
    attempts = () if run is None else run.attempts
    alive = {training, *(attempt.pid for attempt in attempts if is_alive(attempt.pid, attempt.started))}
    for process in psutil.process_iter():
        try:
            if _follows(process.cmdline(), run_dir, name) and process.ppid() not in alive:
                log.warning("%s: a follower of an earlier process hangs and is ended", name)
                os.killpg(process.pid, signal.SIGKILL)  # its session is its own
        except (psutil.Error, OSError):  # somebody else's, or gone
            continue


def _follows(command: Sequence[str], run_dir: Path, name: str) -> bool:
    """Whether this is how `link.py` starts a follower."""
    module, ours = ["-m", "hydraloop.tracking"], command[-1:] == [name]
    return ours and list(command[-4:-2]) == module and Path(command[-2]).resolve() == run_dir.resolve()
