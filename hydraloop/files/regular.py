"""Reads files that may come from anybody: a run or a sweep of another person. Imports no torch."""

from __future__ import annotations

import json
import os
import stat
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
