"""RunLock: only one process at a time writes to a run directory.

The lock is a `flock` on the file `.lock`, which stays there. The system releases it when its process ends. Machines
exclude each other if their file system passes `flock` on to the server, as NFS does.

`.lock.json` says who holds the lock. It is a hint for people, and may be missing or old.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from hydraloop.errors import UserError
from hydraloop.files import atomic
from hydraloop.files.atomic import read_json

if TYPE_CHECKING:
    from filelock import BaseFileLock

FILENAME, _HINT = ".lock", ".lock.json"
"""In a run directory."""
PATIENCE = 5.0
"""Seconds that a start waits for a lock: who looks at a lock holds it for a moment."""
LEASE = 100.0
"""Seconds after which a file server has released the locks of a machine that has crashed. NFS 4 takes 90 s."""
_POLL = 0.1
"""Seconds between two attempts while a start waits."""


@dataclass(frozen=True, slots=True)
class Holder:
    """What the text beside a lock says of the process that holds it. An empty host: there is no text."""

    host: str = ""
    pid: int = 0
    since: str = ""
    """Local time of the acquisition."""
    stop_requested: bool = False
    """Whether `stop` has sent the process a signal."""

    @property
    def is_here(self) -> bool:
        """Return whether the process is on this machine."""
        return self.host == socket.gethostname()


class RunLock:
    """The lock of a run directory: a context manager, with `acquire` and `release`. It can be used several times.

    In a forked process, `release` does nothing.

    Args:
        folder: the run directory. It is created if it does not exist.
        key: the option that named it, for the error.
        patience: seconds that `acquire` waits for the lock.
    """

    def __init__(self, folder: Path, *, key: str, patience: float = PATIENCE) -> None:
        self._path = folder / FILENAME
        self._key, self._patience = key, patience
        self._lock: BaseFileLock | None = None

    def acquire(self) -> Self:
        """Acquire the lock.

        Raises:
            UserError: another process has it, or the directory cannot be written to.
        """
        from filelock import FileLock, Timeout  # 50 ms, which --help and --dry-run do without

        folder = self._path.parent
        self._lock = FileLock(self._path, thread_local=False, fallback_to_soft=False)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=self._patience, poll_interval=_POLL)
        except Timeout:
            found = _hint(folder)
            who = f"process {found.pid} on {found.host}, since {found.since}," if found.host else "another process"
            end = f", or end it: kill {found.pid}" if found.is_here else ""
            remedy = f"Wait until it has ended{end}."
            raise UserError(f"{who} is training in {folder}", key=self._key, remedy=remedy) from None
        except OSError as error:
            remedy = "Name another directory, or free some space."
            raise UserError(f"{folder} cannot be locked: {error.strerror}", key=self._key, remedy=remedy) from error
        _write(folder, Holder(socket.gethostname(), os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S")))
        return self

    def release(self) -> None:
        """Release the lock, if this process has it."""
        if self._lock is not None and self._lock.is_locked:  # not in a fork
            with suppress(OSError):
                (self._path.parent / _HINT).unlink()
            self._lock.release()

    def __enter__(self) -> Self:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def holder(folder: Path) -> Holder | None:
    """Return what holds the lock of a directory; None if the lock is free. Writes nothing."""
    return _hint(folder) if _is_held(folder / FILENAME) else None


def note_stop(folder: Path) -> bool:
    """Note beside a lock that `stop` has sent its holder a signal. Return whether that was noted before."""
    holder = _hint(folder)
    _write(folder, replace(holder, stop_requested=True))
    return holder.stop_requested


def _is_held(path: Path) -> bool:
    """Return whether another process has locked a file. One that may not be read counts as free."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: those who only look do not exclude each other
        fcntl.flock(handle, fcntl.LOCK_UN)  # a process that was forked meanwhile would keep the lock
    except BlockingIOError:
        return True
    except OSError:  # a file system without flock
        return False
    finally:
        os.close(handle)
    return False


def _hint(folder: Path) -> Holder:
    try:
        return Holder(**read_json(folder / _HINT))
    except (OSError, ValueError, TypeError):
        return Holder()


def _write(folder: Path, holder: Holder) -> None:
    with suppress(OSError):  # a full disk: the lock is held nevertheless
        atomic.write_text(folder / _HINT, json.dumps(asdict(holder)), flush=False)
