"""RunLock: only one process at a time writes to a run directory.

The file `.lock` in the directory names the processes of the run that trains there. On the same machine, the lock is
free when all of them have ended. For another machine or container, process ids mean nothing: there, the lock is free
when its modification time is 60 s old. The holder renews that time every 10 s. The age is measured with the clock of
the file system, so the clocks of two machines need not agree. A holder that has lost the lock, because its machine
stalled, is killed: only one process may train in the directory.

Processes of one machine read and write the file under flock, which machines need not share. Between machines, the file
`.lock.acquiring` guards the acquisition: only one process can create it. Both files are read from the server, since a
network file system may show a machine what a file was some seconds ago.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from hydraloop.errors import UserError
from hydraloop.run_files import uncached
from hydraloop.run_files.processes import is_alive, kill_tree, machine, started

log = logging.getLogger(__name__)

FILENAME = ".lock"
"""In a run directory."""
CONTROLLERS = "controllers"
"""In the directory of a sweep: a folder with a lock for each controller."""
BEAT = 10.0
"""Seconds between two renewals."""
HELD = 60.0
"""Seconds without a renewal after which a lock from another machine is free."""
_GUARD = ".lock.acquiring"
"""Beside the lock, while a process acquires it."""
_TRIES = 100
"""Attempts to open a lock that processes of other machines remove."""
_TOLD = b"\ntold to end\n"
_MARGIN = 5.0
"""Seconds that a waiting start adds to that."""
_POLL = 0.5
"""Seconds between two attempts while a start waits."""
_SHORT_POLL = 0.002
"""Seconds between two attempts while another process reads or writes the file."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The content of the file."""

    token: str
    """Random; identifies one acquisition."""
    host: str
    machine: str
    """From `processes.machine`."""
    folder: str
    """The run directory, resolved. A copy of the directory still has the original's."""
    since: str
    """Local time of the acquisition, for messages."""
    processes: tuple[tuple[int, float | None], ...]
    """Ids and starts (from `processes.started`): the process that acquired the lock, and rank 0 if it is another."""

    @property
    def is_here(self) -> bool:
        """Whether the holder is on this machine."""
        return self.machine == machine()

    @property
    def alive(self) -> list[tuple[int, float | None]]:
        """The processes that have not ended, if they are on this machine."""
        return [process for process in self.processes if self.is_here and is_alive(*process)]

    def holds(self, path: Path, handle: int) -> bool:
        """Whether the lock is not free."""
        if not self.is_here:
            return _is_renewed(path.parent, handle)
        copied = os.path.isdir(self.folder) and not os.path.samefile(self.folder, path.parent)
        return not copied and bool(self.alive)


def _is_renewed(folder: Path, handle: int) -> bool:
    """Return whether an open file in a folder was renewed in the last 60 s, by the clock of the file system."""
    try:
        with tempfile.TemporaryFile(dir=folder) as new:
            now = os.fstat(new.fileno()).st_mtime
    except OSError:  # this process may only read, or the disk is full
        now = time.time()
    return now - os.fstat(handle).st_mtime < HELD


class RunLock:
    """The lock of a run directory: a context manager, with `acquire` and `release`. It can be used several times.

    A daemon thread renews the lock while it is held. In a forked process, `release` does nothing.

    Args:
        folder: the run directory. It is created if it does not exist.
        key: the option that named it, for the error.
        wait: wait up to 65 s for a lock from another machine.
        patience: seconds to wait for a lock from this machine.
    """

    def __init__(self, folder: Path, *, key: str, wait: bool = False, patience: float = 0.0) -> None:
        self._path = folder / FILENAME
        self._key, self._wait, self._patience = key, wait, patience
        self._token = ""
        self._owner = 0
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> Self:
        """Acquire the lock.

        Raises:
            UserError: another process has it, or the directory cannot be written to.
        """
        began = time.monotonic()
        waited = False
        while (holder := self.try_acquire()) is not None:
            longest = self._patience if holder.is_here else HELD + _MARGIN if self._wait else 0.0
            if time.monotonic() - began >= longest:
                raise self._refusal(holder)
            if not waited and not holder.is_here:
                waited = True
                log.warning("%s is locked from %s; waiting up to %.0f s", *(self._path.parent, holder.host, longest))
            time.sleep(_POLL)
        return self

    def try_acquire(self, *, renew: bool = True) -> Holder | None:
        """Acquire the lock, or return its holder.

        Args:
            renew: False: start no thread. For a process that forks, and calls `renew` or releases the lock in less than
                60 s.

        Raises:
            UserError: the directory cannot be written to.
        """
        own = Holder(
            token=secrets.token_hex(8),
            host=socket.gethostname(),
            machine=machine(),
            folder=str(self._path.parent.resolve()),
            since=time.strftime("%Y-%m-%d %H:%M:%S"),
            processes=((os.getpid(), started(os.getpid())),),
        )
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if (found := self._written(own)) is not None:
                return found
        except OSError as error:
            problem = f"{self._path.parent} cannot be written: {error.strerror}"
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            remedy = "Free some space." if is_full else "Name another directory."
            raise UserError(problem, key=self._key, remedy=remedy) from error
        self._token, self._owner = own.token, os.getpid()
        if renew:
            self._done.clear()
            self._thread = threading.Thread(target=self._renew, name="hydraloop-lock", daemon=True)
            self._thread.start()
        return None

    def _written(self, own: Holder) -> Holder | None:
        """Write the file, or return the holder that it names."""
        for tries_left in reversed(range(_TRIES)):
            try:
                with _alone(self._path.with_name(_GUARD), own), _opened(self._path, os.O_RDWR | os.O_CREAT) as handle:
                    found = _read(handle)
                    if found is not None and found.holds(self._path, handle):
                        return found
                    _write(handle, own)
                    return None
            except OSError as error:  # the holder on another machine has removed the open file
                if error.errno not in (errno.ENOENT, errno.ESTALE) or not tries_left:
                    raise
        raise AssertionError

    def release(self) -> None:
        """Remove the lock, if this process has it."""
        if self._owner != os.getpid():
            return
        self._owner = 0
        if self._thread is not None:
            self._done.set()
            self._thread.join()
            self._thread = None
        with suppress(OSError), _opened(self._path) as handle:
            if self._is_ours(handle):
                self._path.unlink()

    def renew(self) -> None:
        """Renew the lock once. For a process that has acquired it with `renew=False`."""
        with suppress(OSError):  # the file system may be back at the next renewal
            os.utime(self._path)

    @property
    def is_held(self) -> bool:
        """Whether this process still has the lock. Otherwise it must not write what the lock guards."""
        with suppress(OSError), _opened_to_read(self._path) as handle:
            return self._is_ours(handle)
        return False

    def __enter__(self) -> Self:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _refusal(self, holder: Holder) -> UserError:
        pid, _ = (holder.alive or holder.processes)[0]
        remedy = f"Wait until it has ended, or end it: kill {pid}."
        if not holder.is_here:
            remedy = f"Wait until it has ended. After a crash of {holder.host}, the lock is free within {HELD:.0f} s."
        return UserError(
            f"process {pid} on {holder.host} is training in {self._path.parent}, since {holder.since}",
            key=self._key,
            remedy=remedy,
        )

    def _renew(self) -> None:
        renewed = time.time()
        while not self._done.wait(BEAT):
            is_lost = False
            try:
                with _opened_to_read(self._path) as handle:
                    found = _read(handle)
                is_lost = found is not None and found.token != self._token
            except FileNotFoundError:  # if this machine was suspended, another one may have trained, and ended
                is_lost = time.time() - renewed > HELD
            except OSError:  # the file system may be back at the next renewal
                continue
            if is_lost:
                log.error("%s was not renewed in time, and another process has acquired it: killed", self._path)
                kill_tree(os.getpid())
            self.renew()
            renewed = time.time()

    def _is_ours(self, handle: int) -> bool:
        found = _read(handle)
        return found is not None and found.token == self._token


def holder(folder: Path) -> Holder | None:
    """Return what has the lock of a directory; None if the lock is free."""
    with suppress(OSError), _opened_to_read(folder / FILENAME) as handle:
        found = _read(handle)
        if found is not None and found.holds(folder / FILENAME, handle):
            return found
    return None


def controllers(sweep: Path) -> dict[str, Holder]:
    """Return the controllers of a sweep that are alive. Each has the lock of a folder, `controllers/<id>/`.

    Args:
        sweep: the directory of the sweep.
    """
    found = {folder.name: holder(folder) for folder in (sweep / CONTROLLERS).glob("*")}
    return {name: held for name, held in found.items() if held is not None}


def note_stop(folder: Path) -> bool:
    """Note in a lock, whose holder is on this machine, that the holder is told to end. Returns whether it was before.

    The note is a second line of the file, so it is removed with the lock.
    """
    with suppress(OSError), _opened(folder / FILENAME, os.O_RDWR | os.O_APPEND) as handle:
        was_told = os.pread(handle, 1 << 16, 0).endswith(_TOLD)
        os.write(handle, _TOLD)
        return was_told
    return False


def join(folder: Path) -> None:
    """Add this process to the holders of a lock that its parent process has acquired.

    The lock is then held until both have ended, even if the parent is killed.
    """
    with suppress(OSError), _opened(folder / FILENAME) as handle:
        holder = _read(handle)
        if holder is not None and holder.is_here:
            _write(handle, replace(holder, processes=(*holder.alive, (os.getpid(), started(os.getpid())))))


@contextmanager
def _alone(guard: Path, own: Holder) -> Iterator[None]:
    """In the body, be the only process of all machines that acquires a lock: the one that could create a file.

    When the process that has created the file has ended, another process removes the file, as it would a lock.
    """
    while True:
        try:
            handle = os.open(guard, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            break
        except FileExistsError:
            with suppress(OSError), _opened_to_read(guard) as found:
                maker = _read(found)
                if not (_is_renewed(guard.parent, found) if maker is None else maker.holds(guard, found)):
                    guard.unlink()
            time.sleep(_SHORT_POLL)
    try:
        _write(handle, own)
        yield
    finally:
        os.close(handle)
        guard.unlink(missing_ok=True)


@contextmanager
def _opened(path: Path, flags: int = os.O_RDWR, operation: str = "LOCK_EX") -> Iterator[int]:
    """Open the file and lock it with flock. Repeat if it was removed while this process waited for it."""
    while True:
        handle = uncached.opened(path, flags)
        try:
            _flock(handle, operation)
            try:
                current = os.path.samestat(os.stat(path), os.fstat(handle))
            except FileNotFoundError:
                current = False
            if current:
                yield handle
                return
        finally:
            _flock(handle, "LOCK_UN")  # a process that was forked meanwhile would keep the flock
            os.close(handle)


def _opened_to_read(path: Path) -> AbstractContextManager[int]:
    """Open the file for a process that may not be permitted to write it."""
    return _opened(path, os.O_RDONLY, "LOCK_SH")


def _flock(handle: int, operation: str) -> None:
    import fcntl  # not on Windows

    while True:
        try:
            return fcntl.flock(handle, getattr(fcntl, operation) | fcntl.LOCK_NB)
        except BlockingIOError:  # NFS asks again after up to 30 s, and FUSE would let nobody remove the file meanwhile
            time.sleep(_SHORT_POLL)
        except OSError:  # a file system without flock
            return None


def _read(handle: int) -> Holder | None:
    """Return the holder; None if the file is empty or damaged."""
    try:
        found = json.loads(os.pread(handle, 1 << 16, 0).partition(b"\n")[0])
        return Holder(**{**found, "processes": tuple((int(pid), since) for pid, since in found["processes"])})
    except (ValueError, TypeError, KeyError):
        return None


def _write(handle: int, holder: Holder) -> None:
    """Write the first line in place: on a full disk and after a kill, the holder before is not lost."""
    content = json.dumps(asdict(holder)).encode() + b"\n"
    os.pwrite(handle, content, 0)
    os.ftruncate(handle, len(content))
