"""What a sender keeps in the run directory: its cursor, which is its position in the log, and its lock.

Each tracker of a run has at most one sender. It holds the lock until it ends; the system then releases the lock.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydraloop.run_files import atomic
from hydraloop.run_files.environment import shown
from hydraloop.run_files.processes import is_alive, machine, started
from hydraloop.tracking.tracker import FOLDER

if TYPE_CHECKING:
    from filelock import FileLock

log = logging.getLogger(__name__)

PATIENCE = 15.0
"""Seconds to wait for the sender of an earlier process; longer than the default `flush_timeout`."""


@dataclass(slots=True)
class Cursor:
    """The contents of `<run_dir>/tracking/<hook name>.cursor.json`."""

    kind: str
    """Dotted path of the tracker."""
    options: dict[str, Any]
    """The hook's options, with secrets masked, for `sync.py`."""
    offset: int = 0
    """Bytes of the log that are processed."""
    index: int = 0
    """Lines of the log that are processed."""
    refused: list[int] = field(default_factory=list)
    """Lines that the service has refused."""
    left_out: int = 0
    """Number of lines that `interval` has left out."""
    cuts: int = 0
    """Number of cuts of the log that the service knows of."""
    attempt: int = -1
    """Number of the last attempt that the service knows of; -1: none."""
    finished: bool = False
    """Whether the service has all records of that attempt and knows how it ended."""
    complete: bool = False
    """Whether the service also has all files of that attempt."""
    where: str | None = None
    """Where a person finds the run: an address or a command."""
    memory: dict[str, Any] = field(default_factory=dict)
    """The tracker's own state."""

    @property
    def sent(self) -> int:
        """Number of records that the service has."""
        return self.index - len(self.refused) - self.left_out

    def save(self, run_dir: Path, name: str) -> None:
        """Write the cursor atomically."""
        atomic.write_text(path_of(run_dir, name), json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, run_dir: Path, name: str) -> Cursor | None:
        """Read the cursor of a tracker hook. Returns None if the file does not exist or is damaged."""
        path = path_of(run_dir, name)
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, AttributeError) as error:
            log.warning("%s cannot be read (%s): all records count as not sent", path, error)
            return None


def sync_command(folder: Path, kinds: Iterable[str], *flags: str) -> str:
    """Return the command that sends what trackers of these kinds do not have of a run or sweep."""
    packages = {kind.partition(".")[0] for kind in kinds} - {"hydraloop"}
    trusted = [word for package in sorted(packages) for word in ("--trusted", package)]
    return shlex.join(["python", "-m", "hydraloop", "sync", *flags, *trusted, shown(folder)])


def path_of(run_dir: Path, name: str) -> Path:
    """Return the path of a tracker hook's cursor."""
    return run_dir / FOLDER / f"{name}.cursor.json"


def hook_names(run_dir: Path) -> list[str]:
    """Return the names of the tracker hooks that a run has had."""
    return sorted(path.name.removesuffix(".cursor.json") for path in (run_dir / FOLDER).glob("*.cursor.json"))


def run_dirs(folder: Path) -> list[Path]:
    """Return the runs with a tracker in a folder and below it, `2` before `10`."""
    found = {path.parent.parent for path in folder.rglob(f"{FOLDER}/*.cursor.json")}
    return sorted(found, key=lambda path: [(len(part), part) for part in path.parts])


def lock_of(run_dir: Path, name: str) -> FileLock:
    """Return the lock of a tracker hook's sender."""
    from filelock import FileLock  # imported here, because the command line does not need it

    return FileLock(run_dir / FOLDER / f"{name}.lock")


def sign(run_dir: Path, name: str, owner: Sequence[float | None]) -> None:
    """Note the machine, and the ids and starts of this sender, which holds the lock, and of its owner.

    The owner is the training process; if jobs share the sender, the controller of their sweep.
    """
    atomic.remove_unfinished(path_of(run_dir, name))  # of senders that were killed
    with suppress(OSError):  # not in the lock file, which older versions of filelock truncate
        content = json.dumps([machine(), [os.getpid(), started(os.getpid())], list(owner)])
        _holder(run_dir, name).write_text(content)


def wait_for_followers(run_dir: Path) -> None:
    """Wait for senders of an earlier process, and kill those that hang on this machine.

    `sync`, or a sender on another machine, may send longer. When the log is cut, `Follower` notices it and ends.
    """
    for name in sorted(path.stem for path in (run_dir / FOLDER).glob("*.lock")):
        if not is_free(run_dir, name, 0.0):
            log.info("%s: waiting for the sender of an earlier process", name)
            if not is_free(run_dir, name, PATIENCE):
                kill_hanging(run_dir, name)
                if not is_free(run_dir, name, 1.0):
                    log.warning("%s: another process is sending this run's records", name)
                    continue
        _holder(run_dir, name).unlink(missing_ok=True)  # the next sender, which may still be starting, has not ended


def is_followed(run_dir: Path) -> bool:
    """Return whether a sender reads the log of a run now."""
    return any(not is_free(run_dir, path.stem, 0.0) for path in (run_dir / FOLDER).glob("*.lock"))


def has_ended(run_dir: Path, name: str) -> bool:
    """Return whether a sender has had the lock and does not have it now."""
    return _holder(run_dir, name).exists() and is_free(run_dir, name, 0.0)


def kill_hanging(run_dir: Path, name: str) -> None:
    """Kill the sender that holds the lock, unless its owner is alive and is not this process.

    Does nothing if the sender is on another machine, where process ids mean something else.
    """
    try:
        where, (pid, since), owner = json.loads(_holder(run_dir, name).read_text())
    except (OSError, ValueError):
        return
    if where == machine() and is_alive(pid, since) and (owner[0] == os.getpid() or not is_alive(*owner)):
        log.warning("%s: the sender of an earlier process hangs and is killed", name)
        with suppress(OSError):
            os.killpg(pid, signal.SIGKILL)  # a sender leads its own session


def is_free(run_dir: Path, name: str, seconds: float) -> bool:
    """Wait at most `seconds` until nobody holds the lock. Returns whether nobody does."""
    from filelock import Timeout

    try:
        with lock_of(run_dir, name).acquire(timeout=seconds):
            return True
    except Timeout:
        return False


def _holder(run_dir: Path, name: str) -> Path:
    return run_dir / FOLDER / f"{name}.pid"
