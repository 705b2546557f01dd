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
import logging
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from hydraloop.errors import UserError
from hydraloop.run_files.lock_file.access import alone, opened, opened_to_read
from hydraloop.run_files.lock_file.holder import HELD, Holder, read, write
from hydraloop.run_files.processes import kill_tree, machine, started

log = logging.getLogger(__name__)

FILENAME = ".lock"
"""In a run directory."""
CONTROLLERS = "controllers"
"""In the directory of a sweep: a folder with a lock for each controller."""
BEAT = 10.0
"""Seconds between two renewals."""
_GUARD = ".lock.acquiring"
"""Beside the lock, while a process acquires it."""
_TRIES = 100
"""Attempts to open a lock that processes of other machines remove."""
_TOLD = b"\ntold to end\n"
_MARGIN = 5.0
"""Seconds that a waiting start adds to `HELD`."""
_POLL = 0.5
"""Seconds between two attempts while a start waits."""


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
                with alone(self._path.with_name(_GUARD), own), opened(self._path, os.O_RDWR | os.O_CREAT) as handle:
                    found = read(handle)
                    if found is not None and found.holds(self._path, handle):
                        return found
                    write(handle, own)
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
        with suppress(OSError), opened(self._path) as handle:
            if self._is_ours(handle):
                self._path.unlink()

    def renew(self) -> None:
        """Renew the lock once. For a process that has acquired it with `renew=False`."""
        with suppress(OSError):  # the file system may be back at the next renewal
            os.utime(self._path)

    @property
    def is_held(self) -> bool:
        """Whether this process still has the lock. Otherwise it must not write what the lock guards."""
        with suppress(OSError), opened_to_read(self._path) as handle:
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
                with opened_to_read(self._path) as handle:
                    found = read(handle)
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
        found = read(handle)
        return found is not None and found.token == self._token


def holder(folder: Path) -> Holder | None:
    """Return what has the lock of a directory; None if the lock is free."""
    with suppress(OSError), opened_to_read(folder / FILENAME) as handle:
        found = read(handle)
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
    with suppress(OSError), opened(folder / FILENAME, os.O_RDWR | os.O_APPEND) as handle:
        was_told = os.pread(handle, 1 << 16, 0).endswith(_TOLD)
        os.write(handle, _TOLD)
        return was_told
    return False


def join(folder: Path) -> None:
    """Add this process to the holders of a lock that its parent process has acquired.

    The lock is then held until both have ended, even if the parent is killed.
    """
    with suppress(OSError), opened(folder / FILENAME) as handle:
        holder = read(handle)
        if holder is not None and holder.is_here:
            write(handle, replace(holder, processes=(*holder.alive, (os.getpid(), started(os.getpid())))))
