"""The lock of a follower: each tracker of a run has at most one follower, which holds the lock while it lives."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hydraloop.run.processes import is_alive, started

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


def sign(run_dir: Path, name: str, training: Sequence[float | None]) -> None:
    """Note the ids and starts of this follower, which holds the lock, and of its training process."""
    with suppress(OSError):  # not in the lock file, which older versions of filelock truncate
        _holder(run_dir, name).write_text(json.dumps([[os.getpid(), started(os.getpid())], list(training)]))


def end_hanging(run_dir: Path, name: str, training: int) -> None:
    """Kill the follower that holds the lock if its training process has exited. Otherwise, it could hold it forever.

    Args:
        run_dir: directory of the run.
        name: name of the tracker hook.
        training: id of the process that trains now.
    """
    try:
        (pid, since), (trained, trained_since) = json.loads(_holder(run_dir, name).read_text())
    except (OSError, ValueError):
        return
    if is_alive(pid, since) and (trained == training or not is_alive(trained, trained_since)):
        log.warning("%s: the follower of an earlier process hangs and is killed", name)
        with suppress(OSError):
            os.killpg(pid, signal.SIGKILL)  # a follower leads its own session


def wait_for_followers(run_dir: Path) -> bool:
    """Wait for followers of an earlier process, and kill those that hang. Returns whether all of them have ended."""
    found = [_ended(run_dir, path.stem) for path in sorted((run_dir / FOLDER).glob("*.lock"))]
    return all(found)


def is_free(run_dir: Path, name: str, seconds: float = 0.0) -> bool:
    """Wait until no process holds the lock. Returns whether that is so."""
    from filelock import Timeout

    try:
        with lock_of(run_dir, name).acquire(timeout=seconds):
            return True
    except Timeout:
        return False


def _ended(run_dir: Path, name: str) -> bool:
    if is_free(run_dir, name):
        return True
    log.info("%s: waiting for the follower of an earlier process", name)
    if is_free(run_dir, name, PATIENCE):
        return True
    end_hanging(run_dir, name, os.getpid())
    if is_free(run_dir, name, 1.0):
        return True
    log.warning("%s: %s", name, BUSY)
    return False


def _holder(run_dir: Path, name: str) -> Path:
    return run_dir / FOLDER / f"{name}.pid"
