"""The record log, `metrics.jsonl`: appended to by the logger, read by whoever follows it. Without torch."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hydraloop.tracking.tracker import Record

FILENAME = "metrics.jsonl"
"""The default; the logger hook's option `filename` may say otherwise."""
STAMP = "timestamp"
"""The entry at the end of each line: seconds since 1970."""
NONFINITE = "nonfinite"
"""The entry that says what a null was: JSON has no NaN and no infinity."""
_CHUNK = 1 << 16


class RecordLog:
    """Lines of JSON, appended, each flushed as a whole: whoever follows the file sees complete records.

    Not synced to disk: they survive the process, not a power failure, and a line costs some 5 µs.
    """

    def __init__(self, path: Path) -> None:
        cut_torn_line(path)
        self._file: IO[bytes] = path.open("ab")

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a record, with the time.

        Raises:
            TypeError: there is something in it that is no plain number or string.
        """
        self._file.write(as_json(record).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


_encode = json.JSONEncoder(allow_nan=False).encode


def as_json(record: Mapping[str, Any]) -> str:
    """A record as a line, without its end: `{…, "timestamp": …}`; NaN and infinity become null and are named.

    Raises:
        TypeError: there is something in it that is no plain number or string.
    """
    nonfinite: dict[str, str] = {}
    for name, value in record.items():
        if value is not None and not isinstance(value, str | int | float):
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
    """Cut off a last line without its end, left by a process that was killed while writing."""
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


@dataclass(slots=True)
class Position:
    """A place in the log, between two lines."""

    offset: int = 0
    """In bytes."""
    index: int = 0
    """Lines before it."""


class Reader:
    """Reads a log that somebody else appends to.

    Args:
        path: of the log, which need not exist yet.
        position: where to begin; moved on by `read`.
    """

    def __init__(self, path: Path, position: Position) -> None:
        self._path, self.position = path, position
        self._iteration = 0
        """Of the last record: that of one that does not say."""

    def read(self, most: int) -> tuple[list[Record], Position]:
        """The next complete lines, `most` at most, and the position behind them. The reader itself does not move."""
        records: list[Record] = []
        offset, index = self.position.offset, self.position.index
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return [], self.position
        with file:
            file.seek(offset)
            while len(records) < most:
                line = file.readline()
                if not line.endswith(b"\n"):
                    break
                records.append(_parse(line, index, self._iteration))
                self._iteration = records[-1].iteration
                offset, index = offset + len(line), index + 1
        return records, Position(offset, index)

    def move(self, position: Position) -> None:
        """Go on from there."""
        self.position = position

    def find(self, index: int) -> Position:
        """The position before line `index`."""
        offset = 0
        if index:
            with self._path.open("rb") as file:
                offset = sum(len(file.readline()) for _ in range(index))
        return Position(offset, index)


def count(path: Path) -> int:
    """Complete lines in a log."""
    try:
        with path.open("rb") as file:
            return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(_CHUNK), b""))
    except FileNotFoundError:
        return 0


def read_all(path: Path) -> list[Record]:
    """Every record of a log."""
    return Reader(path, Position()).read(1 << 62)[0]


def _parse(line: bytes, index: int, iteration: int) -> Record:
    """A record of any hook's: one that does not say where in the run it belongs belongs to the record before it."""
    try:
        found = json.loads(line)
    except ValueError:  # edited by hand
        found = {}
    entries: dict[str, Any] = found if isinstance(found, dict) else {}
    nonfinite = entries.pop(NONFINITE, None) or {}
    mode, epoch, stamp = entries.pop("mode", "train"), entries.pop("epoch", 0), entries.pop(STAMP, 0.0)
    at = entries.pop("iteration", iteration)
    values = {name: float(value) for name, value in entries.items() if isinstance(value, int | float)}
    values.update((name, float(value)) for name, value in nonfinite.items())
    return Record(
        index=index,
        mode=str(mode),
        epoch=epoch if isinstance(epoch, int) else 0,
        iteration=at if isinstance(at, int) else iteration,
        timestamp=float(stamp),
        values=values,
        texts={name: value for name, value in entries.items() if isinstance(value, str)},
    )
