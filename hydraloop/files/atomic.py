"""Write files atomically; read only regular files of a limited size, because a run may come from anybody."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import Any, BinaryIO

from hydraloop.errors import UserError

_REMEDY = "hydraloop has not written it. Restore the file, or name another directory."
_MOST_BYTES = 100_000_000
"""Size of a JSON file at most. The file of a sweep with 100,000 jobs has 20,000,000."""


class StrangeFileError(UserError, OSError):
    """A file that hydraloop cannot have written."""


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading.

    Raises:
        FileNotFoundError: there is no such file.
        StrangeFileError: it is not a regular file: a pipe would wait for its writer.
        OSError: it cannot be read.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise StrangeFileError(f"{path} is not a regular file", remedy=_REMEDY)
    return os.fdopen(handle, "rb")


def read_bytes(path: Path, most: int = _MOST_BYTES) -> bytes:
    """Return the contents of a regular file.

    Raises:
        StrangeFileError: as of `open_regular`, or the file has more than `most` bytes.
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise StrangeFileError(f"{path} has more than {most:,} bytes", remedy=_REMEDY)
    return content


def parsed_json(content: bytes | str) -> Any:
    """Return a text of JSON as Python objects.

    Raises:
        ValueError: it is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path) -> Any:
    """Return the contents of a JSON file. Errors: as of `read_bytes` and `parsed_json`."""
    return parsed_json(read_bytes(path))


LONGEST_NAME = 150
"""Bytes of a file name that are left for a given name. File systems allow 255 for all, with numbers and suffixes."""


def file_name(name: str, bad: str = "/", *, longest: int = LONGEST_NAME) -> str:
    """Return the name of a metric, picture or job as a part of a file name.

    A name that is too long is cut and gets a digest, so that two long names have different files.

    Args:
        name: any text.
        bad: a regular expression for the characters that become `_`.
        longest: number of bytes.
    """
    encoded, usable = name.encode(errors="replace"), re.sub(bad, "_", name).encode(errors="replace")
    if len(usable) <= longest:
        return usable.decode()
    digest = hashlib.sha256(encoded).hexdigest()[:8]
    return f"{usable[: longest - 9].decode(errors='ignore')}-{digest}"


@contextmanager
def replacing(path: Path, *, flush: bool = True, with_folder: bool = True) -> Iterator[Path]:
    """Yield a path to write to. On exit, flush that file to the disk, rename it to `path` and flush the folder.

    Args:
        path: the file to replace or create. Its folder must exist.
        flush: False: do not wait for the disk. After a power failure, the file may be empty.
        with_folder: False: do not flush the folder. After a power failure, the old file may be there.

    Raises:
        OSError: the file cannot be written. As after any error, `path` is unchanged and no other file is left.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield unfinished
        if flush:
            with unfinished.open("rb+") as file:
                os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        with suppress(OSError):  # do not replace the error that is being raised
            unfinished.unlink(missing_ok=True)
    if flush and with_folder:
        flush_folder(path.parent)


def write_text(path: Path, text: str, *, flush: bool = True) -> None:
    """Replace the contents of a file, as UTF-8. `flush` and errors: as in `replacing`."""
    write_bytes(path, text.encode("utf-8"), flush=flush)


def write_bytes(path: Path, content: bytes, *, flush: bool = True) -> None:
    """Replace the contents of a file. `flush` and errors: as in `replacing`."""
    with replacing(path, flush=flush) as unfinished:
        unfinished.write_bytes(content)


def link(path: Path, other: Path) -> None:
    """Replace `other` by a hard link to a complete file, or by a copy where the file system has no links."""
    with replacing(other) as unfinished:
        unfinished.unlink(missing_ok=True)  # of a killed process with the same number
        try:
            os.link(path, unfinished)
        except OSError:
            shutil.copyfile(path, unfinished)


def remove_unfinished(path: Path) -> None:
    """Remove what killed processes have left of `path`. No other process may be writing it."""
    for part in path.parent.glob(f".{escape(path.name)}.*.part"):
        with suppress(OSError):  # a folder that may not be written
            part.unlink()


def flush_folder(folder: Path) -> None:
    """Flush the names of files. Some network file systems cannot, but the files are complete anyway."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
