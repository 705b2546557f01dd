"""The record log, `metrics.jsonl`, for its readers, the trackers. `record_writer.py` writes it. Imports no torch."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, cast, get_args

log = logging.getLogger(__name__)

FILENAME = "metrics.jsonl"
"""Its name in every run directory."""
STAMP = "timestamp"
"""The last entry of each line: seconds since 1970."""
NONFINITE = "nonfinite"
"""The entry with the names of values that are null because JSON has no NaN and infinity."""
OBJECTS = "objects"
"""The entry with the files that a record announces: `[{"kind": "image", "name": "predictions", "path": "media/…"}]`."""
_PERFORMANCE = frozenset({"eta", "time", "data_time", "memory", "mfu", "skipped"})
"""Values of the logger's training records that describe the speed, not the model."""
_CHUNK = 1 << 16
_MOST = 1 << 63
"""Services accept only smaller iterations and epochs."""


ObjectKind = Literal["image", "text", "table", "histogram", "artifact"]


@dataclass(frozen=True, slots=True)
class LoggedObject:
    """A file that a record announces, such as a picture."""

    kind: ObjectKind
    """A histogram's file is JSON, several histograms by name (`engine/records/histograms.py`). A table's file is JSON,
    `{"columns": [...], "rows": [[...]]}`."""
    name: str
    """With the mode of the record: `val/predictions`."""
    path: str
    """Relative to the run directory."""


@dataclass(frozen=True, slots=True)
class Record:
    """One line of the record log."""

    index: int
    """Number of its line, from 0."""
    mode: str
    """`train`, `val` or `test`."""
    epoch: int
    iteration: int
    """Completed iterations: the x-axis of all charts."""
    timestamp: float
    """Time of writing, in seconds since 1970."""
    values: dict[str, float]
    """The other numbers by name, with NaN and infinity."""
    texts: dict[str, str]
    """The other strings by name."""
    objects: tuple[LoggedObject, ...] = ()
    """Files that the record announces."""

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers by the names that trackers use: `train/loss`, `val/accuracy`, `perf/time`."""
        speed: frozenset[str] = _PERFORMANCE if self.mode == "train" else frozenset()
        return {f"{'perf' if name in speed else self.mode}/{name}": value for name, value in self.values.items()}


@dataclass(slots=True)
class Position:
    """A position in the log, between two lines."""

    offset: int = 0
    """In bytes."""
    index: int = 0
    """Number of lines before it."""


class Reader:
    """Reads a log while another process appends to it.

    A user may have written or edited lines: entries that a record cannot have are left out, with one warning.

    Args:
        path: of the log. It need not exist yet.
        position: where to begin.
    """

    def __init__(self, path: Path, position: Position) -> None:
        self._path, self.position = path, position
        self._iteration = 0
        """Of the last record; used for a record without an iteration."""
        self._warned = False

    def read(self, most: int) -> tuple[list[Record], Position]:
        """Return at most `most` of the next complete lines, and the position after them. The reader does not move."""
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
            log.warning("%s, line %d: ignored, without further warnings: %s", self._path.name, index + 1, what)
        self._warned = True

    def move(self, position: Position) -> None:
        """Continue from a position."""
        self.position = position

    def find(self, index: int) -> Position:
        """Return the position before line `index`."""
        offset = 0
        if index:
            with self._path.open("rb") as file:
                offset = sum(len(file.readline()) for _ in range(index))
        return Position(offset, index)


def count(path: Path) -> int:
    """Return the number of complete lines in a log."""
    try:
        with path.open("rb") as file:
            return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(_CHUNK), b""))
    except FileNotFoundError:
        return 0


def read_all(path: Path) -> list[Record]:
    """Return every record of a log."""
    return Reader(path, Position()).read(1 << 62)[0]


def _parse(line: bytes, index: int, iteration: int) -> tuple[Record, list[str]]:
    """Return a line as a record, and the names of the entries that were left out.

    A record without an iteration gets that of the record before it.
    """
    entries = _entries(line)
    if entries is None:
        entries, odd = {}, ["all of it"]
    else:
        odd = []
    named = entries.pop(NONFINITE) if isinstance(entries.get(NONFINITE), dict) else {}
    mode, epoch, at = entries.pop("mode", "train"), entries.pop("epoch", 0), entries.pop("iteration", iteration)
    stamp = _number(entries.pop(STAMP, 0.0))
    objects = _objects(entries.pop(OBJECTS, None), str(mode), odd)
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
        objects=objects,
    )
    return record, odd


def _objects(found: Any, mode: str, odd: list[str]) -> tuple[LoggedObject, ...]:
    """Return the files that a record announces; files outside the run directory are left out, and named in `odd`."""
    objects = []
    for one in found if isinstance(found, list) else []:
        kind, name, path = (one.get(key) for key in ("kind", "name", "path")) if isinstance(one, dict) else [None] * 3
        inside = isinstance(path, str) and not PurePosixPath(path).is_absolute() and ".." not in path.split("/")
        if kind in get_args(ObjectKind) and isinstance(name, str) and inside:
            objects.append(LoggedObject(cast(ObjectKind, kind), f"{mode}/{name}", str(path)))
    if found is not None and (not isinstance(found, list) or len(objects) < len(found)):
        odd.append(OBJECTS)
    return tuple(objects)


def _entries(line: bytes) -> dict[str, Any] | None:
    """Return the entries of a line; None if it is not a JSON object."""
    try:
        found = json.loads(line)
        if b"\\ud" in line:  # half a surrogate pair, which services refuse
            found = json.loads(json.dumps(found, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _number(value: Any, *, named: bool = False) -> float | None:
    """Return a number, or a named one (`"inf"`); None if it is not a number or too large."""
    if not isinstance(value, int | float) and not (named and isinstance(value, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < _MOST
