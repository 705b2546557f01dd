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


def wait_for_followers(run_dir: Path) -> bool:
    """Wait for followers of an earlier process, and kill those that hang. Returns whether all of them have ended."""
    found = [_ended(run_dir, path.stem) for path in sorted((run_dir / FOLDER).glob("*.lock"))]
    return all(found)


def _ended(run_dir: Path, name: str) -> bool:
    if _is_free(run_dir, name, 0.0):
        return True
    log.info("%s: waiting for the follower of an earlier process", name)
    if _is_free(run_dir, name, PATIENCE):
        return True
    kill_hanging(run_dir, name)
    if _is_free(run_dir, name, 1.0):
        return True
    log.warning("%s: %s", name, BUSY)
    return False


def has_ended(run_dir: Path, name: str) -> bool:
    """Return whether a follower has had the lock and does not have it now."""
    return _holder(run_dir, name).exists() and _is_free(run_dir, name, 0.0)


def _is_free(run_dir: Path, name: str, seconds: float) -> bool:
    from filelock import Timeout

    try:
        with lock_of(run_dir, name).acquire(timeout=seconds):
            return True
    except Timeout:
        return False


def kill_hanging(run_dir: Path, name: str) -> None:
    """Kill the follower that holds the lock, unless its training process is alive and is not this one."""
    try:
        (pid, since), training = json.loads(_holder(run_dir, name).read_text())
    except (OSError, ValueError):
        return
    if is_alive(pid, since) and (training[0] == os.getpid() or not is_alive(*training)):
        log.warning("%s: the follower of an earlier process hangs and is killed", name)
        with suppress(OSError):
            os.killpg(pid, signal.SIGKILL)  # a follower leads its own session


def _holder(run_dir: Path, name: str) -> Path:
    return run_dir / FOLDER / f"{name}.pid"
