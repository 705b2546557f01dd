"""Writes the record log, `metrics.jsonl`: whole lines in order, also on a disk that is full for a while."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from hydraloop.run_files.record_log import NONFINITE, OBJECTS, STAMP, count

log = logging.getLogger(__name__)

KEPT = 16 << 20
"""Bytes of records that are kept while the log cannot be written: about 50,000 records, and little next to a model."""
_CHUNK = 1 << 16


class RecordLog:
    """Appends lines of JSON, unbuffered, so that readers see each at once.

    If the file cannot be written (a full disk), a warning is logged once. The record is kept in memory and written with
    the next one, in order. At most `KEPT` bytes are kept; then the oldest records are dropped. No line is ever torn.

    The file is not synced to disk: records survive a kill of the process, but not a power failure. A line takes about
    5 µs.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._waiting: deque[tuple[int, bytes]] = deque()
        """Iterations and lines that are not in the file."""
        self._size = 0
        """Bytes of the lines that wait."""
        self._problem: str | None = None
        """Why the file could not be written, the last time."""
        self._missing: list[int] = []
        """Number of records that were dropped, their first and their last iteration; empty without dropped records."""
        self.written = 0
        """Number of records in the file, with those that wait and those that were dropped."""
        with suppress(OSError):
            self.written = count(path)

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a record with the time, after those that could not be written before.

        Raises:
            TypeError: a value is not a plain number or string, or `objects` is not a list of mappings of strings.
        """
        line = as_json(record).encode() + b"\n"
        self._waiting.append((record.get("iteration", 0), line))
        self._size += len(line)
        self.written += 1
        while self._size > KEPT:
            self._drop_oldest()
        self._write()

    def close(self) -> None:
        """Write the records that were kept, log how many are missing if that fails, and close the file.

        A later record opens it again.
        """
        if self._waiting:
            self._write()
        while self._waiting:
            self._drop_oldest()
        if self._missing:
            number, first, last = self._missing
            text = "%s lacks %d record%s of the iterations %s to %s: %s"
            log.warning(text, self._path.name, number, "s" if number > 1 else "", first, last, self._problem)
            self._missing = []
        if self._file is not None:
            self._file.close()
            self._file = None

    def _drop_oldest(self) -> None:
        iteration, line = self._waiting.popleft()
        self._size -= len(line)
        count, first, _ = self._missing or (0, iteration, iteration)
        self._missing = [count + 1, first, iteration]

    def _write(self) -> None:
        """Write all lines that wait, or warn. The file is opened again after an error, which cuts off a torn line."""
        try:
            if self._file is None:
                cut_torn_line(self._path)
                self._file = self._path.open("ab", buffering=0)
            while self._waiting:
                line = self._waiting[0][1]
                written = self._file.write(line)
                while written < len(line):  # a full disk takes a part, and refuses the rest
                    written += self._file.write(line[written:])
                self._size -= len(line)
                self._waiting.popleft()
        except OSError as error:
            if self._problem is None:
                log.warning(
                    "%s cannot be written: %s: %s; the records are kept in memory, up to %d MiB, and written later",
                    self._path.name, type(error).__name__, error, KEPT >> 20,
                )  # fmt: skip
            self._problem = f"{type(error).__name__}: {error}"
            if self._file is not None:
                with suppress(OSError):
                    self._file.close()
            self._file = None
            with suppress(OSError):
                cut_torn_line(self._path)


def _files(value: Any) -> bool:
    """Return whether a value is a list of descriptions of files."""
    return isinstance(value, list) and all(
        isinstance(one, dict) and all(isinstance(text, str) for text in one.values()) for one in value
    )


_encode = json.JSONEncoder(allow_nan=False).encode


def as_json(record: Mapping[str, Any]) -> str:
    """Return a record as a line, without the newline: `{…, "timestamp": …}`. NaN and infinity become null.

    Raises:
        TypeError: a value is not a plain number or string, or `objects` is not a list of mappings of strings.
    """
    nonfinite: dict[str, str] = {}
    for name, value in record.items():
        if value is not None and not isinstance(value, str | int | float) and not (name == OBJECTS and _files(value)):
            raise TypeError(
                f"a record has plain numbers and strings, not a {type(value).__name__} as its {name!r}: use .item() or "
                "str(), or several names"
            )
        if isinstance(value, float) and not math.isfinite(value):
            nonfinite[name] = str(value)
    if nonfinite:
        record = {**record, **dict.fromkeys(nonfinite), NONFINITE: nonfinite}
    return _encode({**record, STAMP: round(time.time(), 3)})


def cut_torn_line(path: Path) -> None:
    """Cut off an incomplete last line, left by a process that was killed while writing."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        end = position = file.seek(0, os.SEEK_END)
        while position > 0:
            start = max(0, position - _CHUNK)
            file.seek(start)
            found = file.read(position - start).rfind(b"\n")
            if found >= 0:
                position = start + found + 1
                break
            position = start
        if position != end:
            file.truncate(position)
