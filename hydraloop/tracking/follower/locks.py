"""The lock of a follower: each tracker of a run has at most one follower, which holds the lock while it lives."""

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
"""Folder in a run directory with the description of the run, cursors, locks and logs of trackers."""
PATIENCE = 15.0
"""Seconds to wait for the follower of an earlier process; longer than the default `flush_timeout`."""
BUSY = "another process is sending this run's records"


def lock_of(run_dir: Path, name: str) -> FileLock:
    """Return the lock of a tracker hook's follower. The system releases it when the process exits for any reason."""
    from filelock import FileLock  # imported here, because the command line does not need it

    return FileLock(run_dir / FOLDER / f"{name}.lock")


def wait_for_followers(run_dir: Path) -> bool:
    """Wait for followers of an earlier process, and kill those that hang. Returns whether all of them have ended."""
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
    """Return how long to wait for a follower: its `flush_timeout`, but not an hour. The next one can continue."""
    from hydraloop.tracking.follower.cursor import Cursor

    cursor = Cursor.load(run_dir, name)
    given = PATIENCE if cursor is None else float(cursor.options.get("flush_timeout", PATIENCE))
    return min(given + 2.0, PATIENCE)


def end_orphans(run_dir: Path, name: str, training: int) -> None:
    """Kill followers on this machine whose training process has exited. One that hangs would hold the lock forever.

    Args:
        run_dir: directory of the run that they follow.
        name: name of the tracker hook.
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
                log.warning("%s: the follower of an earlier process hangs and is killed", name)
                os.killpg(process.pid, signal.SIGKILL)  # a follower leads its own session
        except (psutil.Error, OSError):  # another user's process, or one that has exited
            continue


def _follows(command: Sequence[str], run_dir: Path, name: str) -> bool:
    """Return whether a command line is one with which `link.py` starts a follower."""
    module, ours = ["-m", "hydraloop.tracking"], command[-1:] == [name]
    return ours and list(command[-4:-2]) == module and Path(command[-2]).resolve() == run_dir.resolve()
