"""Open the file of a lock, alone among the processes of this machine, or of all machines."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from hydraloop.run_files import uncached
from hydraloop.run_files.lock_file.holder import Holder, is_renewed, read, write

_SHORT_POLL = 0.002
"""Seconds between two attempts while another process reads or writes the file."""


@contextmanager
def alone(guard: Path, own: Holder) -> Iterator[None]:
    """In the body, be the only process of all machines that acquires a lock: the one that could create a file.

    When the process that has created the file has ended, another process removes the file, as it would a lock.
    """
    while True:
        try:
            handle = os.open(guard, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            break
        except FileExistsError:
            with suppress(OSError), opened_to_read(guard) as found:
                maker = read(found)
                if not (is_renewed(guard.parent, found) if maker is None else maker.holds(guard, found)):
                    guard.unlink()
            time.sleep(_SHORT_POLL)
    try:
        write(handle, own)
        yield
    finally:
        os.close(handle)
        guard.unlink(missing_ok=True)


@contextmanager
def opened(path: Path, flags: int = os.O_RDWR, operation: str = "LOCK_EX") -> Iterator[int]:
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


def opened_to_read(path: Path) -> AbstractContextManager[int]:
    """Open the file for a process that may not be permitted to write it."""
    return opened(path, os.O_RDONLY, "LOCK_SH")


def _flock(handle: int, operation: str) -> None:
    import fcntl  # not on Windows

    while True:
        try:
            return fcntl.flock(handle, getattr(fcntl, operation) | fcntl.LOCK_NB)
        except BlockingIOError:  # NFS asks again after up to 30 s, and FUSE would let nobody remove the file meanwhile
            time.sleep(_SHORT_POLL)
        except OSError:  # a file system without flock
            return None
