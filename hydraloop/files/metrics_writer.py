"""Write the record log, and cut it when a run is resumed from an earlier checkpoint."""

from __future__ import annotations

import json
import logging
import math
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import IO, Any

from hydraloop.files.atomic import read_bytes
from hydraloop.files.metrics_log import NONFINITE, OBJECTS, STAMP, Position, Reader, count, is_after, read_all

log = logging.getLogger(__name__)


class RecordLog:
    """Appends lines of JSON, unbuffered, so that readers see each at once.

    If the file cannot be written (a full disk), a warning is logged once. The record is kept in memory and written with
    the next one, in order. No line is ever torn.

    The file is not synced to disk: records survive a kill of the process, but not a power failure. A line takes about
    5 µs.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._waiting: deque[bytes] = deque()
        """Lines that are not in the file."""
        self._problem: str | None = None
        """Why the file could not be written, the last time."""
        self.written = 0
        """Number of records in the file, with those that wait."""
        with suppress(OSError):
            self.written = count(path)

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a record with the time, after those that could not be written before.

        Raises:
            TypeError: a value is not a plain number or string, or `objects` is not a list of mappings of strings.
        """
        self._waiting.append(as_json(record).encode() + b"\n")
        self.written += 1
        self._write()

    def close(self) -> None:
        """Write the records that were kept, log how many are missing if that fails, and close the file.

        A later record opens it again.
        """
        if self._waiting:
            self._write()
        if self._waiting:
            log.warning("%s lacks the last %d records: %s", self._path.name, len(self._waiting), self._problem)
            self._waiting.clear()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self) -> None:
        """Write all lines that wait, or warn. The file is opened again after an error, which cuts off a torn line."""
        try:
            if self._file is None:
                cut_torn_line(self._path)
                self._file = self._path.open("ab", buffering=0)
            while self._waiting:
                line = self._waiting[0]
                written = self._file.write(line)
                while written < len(line):  # a full disk takes a part, and refuses the rest
                    written += self._file.write(line[written:])
                self._waiting.popleft()
        except OSError as error:
            if self._problem is None:
                text = "%s cannot be written: %s; the records are kept in memory, and written later"
                log.warning(text, self._path.name, error)
            self._problem = str(error)
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
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("rb+") as file:
        with mmap(file.fileno(), 0, access=ACCESS_READ) as content:
            size, end = len(content), content.rfind(b"\n") + 1
        if end != size:
            file.truncate(end)


def cut_after(path: Path, *, iteration: int, last_validation: int, written: int | None = None) -> None:
    """Bring the log to its state at a checkpoint: remove the records that the resumed run will write again.

    These are the records of later iterations. Among those of the checkpoint's iteration, they are the records of the
    test, and of the validation if it came after the checkpoint. A warning says how many of the others are missing.

    Args:
        path: path of the log.
        iteration: iteration of the checkpoint; -1: without a checkpoint; all records are removed.
        last_validation: iteration of the last validation before the checkpoint.
        written: number of records that the run had written at the checkpoint; None if it is not known.
    """
    cut_torn_line(path)
    first_removed = None
    readable = 0
    total = 0
    for record in read_all(path):
        total += 1
        is_later = is_after(record.mode, record.iteration, iteration=iteration, last_validation=last_validation)
        if first_removed is None and is_later:
            first_removed = record.index
        readable += first_removed is None and not record.is_damaged
    if written is not None and readable < written:
        text = "%s lacks %d of the %d records up to iteration %d: lines are missing or damaged"
        log.warning(text, path.name, written - readable, written, iteration)
    if first_removed is None:
        return
    end = Reader(path, Position()).find(first_removed).offset
    # The cut is listed before it is made: a sender that starts after a kill in between must know of it.
    with _list_of(path).open("a", encoding="ascii") as listed:
        listed.write(f"{first_removed}\n")
    with path.open("rb+") as opened:
        opened.truncate(end)
    count = total - first_removed
    log.info("%d record%s after iteration %d removed from %s", count, "s" * (count > 1), max(iteration, 0), path.name)


def cuts(path: Path) -> list[int]:
    """Return all cuts of a log, in order: the number of lines that remained."""
    try:
        return list(map(int, read_bytes(_list_of(path)).split()))
    except FileNotFoundError:
        return []


def still_there(path: Path, index: int, seen: int) -> int:
    """Return how many of the first `index` records are still in the log after the cuts that follow the first `seen`."""
    return min([index, *cuts(path)[seen:]])


def _list_of(path: Path) -> Path:
    return path.with_name(f"{path.stem}.cuts{path.suffix}")
