"""Write files atomically: after a kill or a power failure, there is the old file or the complete new one.

Also the names of files that are made of the names of metrics and pictures.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path

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
def replacing(path: Path, *, inside: str | None = None, flush: bool = True) -> Iterator[Path]:
    """Yield a path to write to. On exit, flush that file to the disk, rename it to `path` and flush the folder.

    Args:
        path: the file to replace or create. Its folder must exist.
        inside: the name of the yielded path, which is then in a temporary folder.
        flush: False: do not wait for the disk. After a power failure, the file may be empty.

    Raises:
        OSError: the file cannot be written. As after any error, `path` is unchanged and no other file is left.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    unfinished = part if inside is None else part / inside
    try:
        if inside is not None:
            part.mkdir(exist_ok=True)
        yield unfinished
        if flush:
            with unfinished.open("rb+") as file:
                os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        with suppress(OSError):  # do not replace the error that is being raised
            unfinished.unlink(missing_ok=True)
            if inside is not None:
                part.rmdir()
    if flush:
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
