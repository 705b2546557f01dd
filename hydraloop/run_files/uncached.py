"""Read files as they are now. A machine may see files of a network file system as they were some seconds ago.

Such a file system caches the size and the times of a file, and that a file does not exist. NFS asks the server when a
file is opened; other file systems wait until the caches expire.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import Any

_SYNC, _OF_HANDLE, _ALL = 0x2000, 0x1000, 0x7FF
"""Linux's AT_STATX_FORCE_SYNC, AT_EMPTY_PATH and STATX_BASIC_STATS."""


def opened(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a file. `os.fstat` then tells its present size and time.

    Raises:
        OSError: as `os.open`.
    """
    try:
        handle = os.open(path, flags, 0o666)
    except FileNotFoundError:
        # The name may be cached as missing; with O_CREAT, as that of a file that was removed. Creating asks the server.
        if flags & os.O_CREAT:
            flags |= os.O_EXCL
        elif path.name not in os.listdir(path.parent):
            raise
        handle = os.open(path, flags | os.O_CREAT, 0o666)
    refresh(handle)
    return handle


def reader(path: Path) -> BufferedReader:
    """Open a file for reading. Errors: as of `opened`."""
    return os.fdopen(opened(path), "rb")


def read(path: Path) -> bytes:
    """Return the content of a file. Errors: as of `opened`."""
    with reader(path) as file:
        return file.read()


def refresh(handle: int) -> None:
    """Ask the server for the size and the times of an open file."""
    with suppress(AttributeError):  # another system than Linux
        _library().statx(handle, b"", _OF_HANDLE | _SYNC, _ALL, ctypes.create_string_buffer(256))  # `os.statx` is new


@cache
def _library() -> Any:
    return ctypes.CDLL(None)


def refresh_all(folder: Path) -> None:
    """Let this machine see the files of a folder, and of the folders in it, as another machine has left them."""
    for path in folder.rglob("*"):  # names are not cached
        with suppress(OSError):  # it was removed
            if not path.is_dir():
                os.close(opened(path))
