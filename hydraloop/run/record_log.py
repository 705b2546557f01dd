"""The record log, `metrics.jsonl`: appended to by the logger, read by whoever follows it. Without torch."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

log = logging.getLogger(__name__)

FILENAME = "metrics.jsonl"
"""Its name in every run directory."""
STAMP = "timestamp"
"""The entry at the end of each line: seconds since 1970."""
NONFINITE = "nonfinite"
"""The entry that says what a null was: JSON has no NaN and no infinity."""
_CHUNK = 1 << 16
_MOST = 1 << 63
"""Above what services take as an iteration or an epoch."""


@dataclass(frozen=True, slots=True)
class Record:
    """One line of the record log."""

    index: int
    """Its line, from 0."""
    mode: str
    """`train`, `val` or `test`."""
    epoch: int
    iteration: int
    """Completed iterations: the axis of all charts."""
    timestamp: float
    """When it was written, in seconds since 1970."""
    values: dict[str, float]
    """Its numbers by name, without those above; NaN and infinity are themselves again."""
    texts: dict[str, str]
    """Its strings by name (`picture`: a path relative to the run directory), `mode` left out."""

    @property
    def metrics(self) -> dict[str, float]:
        """Its numbers as trackers name them: `train/loss`, `val/accuracy`."""
        return {f"{self.mode}/{name}": value for name, value in self.values.items()}


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

    Anybody may have written or edited a line: what is no entry of a record's is left out, with one warning.

    Args:
        path: of the log, which need not exist yet.
        position: where to begin; moved on by `read`.
    """

    def __init__(self, path: Path, position: Position) -> None:
        self._path, self.position = path, position
        self._iteration = 0
        """Of the last record: that of one that does not say."""
        self._warned = False

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
                record, odd = _parse(line, index, self._iteration)
                records.append(record)
                if odd:
                    self._warn(index, odd)
                self._iteration = record.iteration
                offset, index = offset + len(line), index + 1
        return records, Position(offset, index)

    def _warn(self, index: int, odd: list[str]) -> None:
        if not self._warned:
            what = ", ".join(map(repr, odd))
            log.warning("%s, line %d: left out, as others like it will be: %s", self._path.name, index + 1, what)
        self._warned = True

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


def _parse(line: bytes, index: int, iteration: int) -> tuple[Record, list[str]]:
    """A record of any hook's, whatever the line is, and the names of what was left out of it.

    One that does not say where in the run it belongs belongs to the record before it.
    """
    entries = _entries(line)
    if entries is None:
        entries, odd = {}, ["all of it"]
    else:
        odd = []
    named = entries.pop(NONFINITE) if isinstance(entries.get(NONFINITE), dict) else {}
    mode, epoch, at = entries.pop("mode", "train"), entries.pop("epoch", 0), entries.pop("iteration", iteration)
    stamp = _number(entries.pop(STAMP, 0.0))
    values: dict[str, float] = {}
    texts: dict[str, str] = {}
    for name, value in (*entries.items(), *named.items()):
        number = _number(value, named=name in named)
        if number is not None:
            values[name] = number
        elif isinstance(value, str) and name not in named:
            texts[name] = value
        elif value is not None:
            odd.append(name)
    record = Record(
        index=index,
        mode=str(mode),
        epoch=epoch if _is_count(epoch) else 0,
        iteration=at if _is_count(at) else iteration,
        timestamp=stamp if stamp is not None and math.isfinite(stamp) else 0.0,
        values=values,
        texts=texts,
    )
    return record, odd


def _entries(line: bytes) -> dict[str, Any] | None:
    """What a line has; None where it is no object of JSON."""
    try:
        found = json.loads(line)
        if b"\\ud" in line:  # half a character, which no service can take
            found = json.loads(json.dumps(found, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _number(value: Any, *, named: bool = False) -> float | None:
    """A number; also one that is named, `"inf"`; None for what is none, or too large for one."""
    if not isinstance(value, int | float) and not (named and isinstance(value, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < _MOST
