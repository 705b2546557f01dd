"""The record log, `metrics.jsonl`, for its readers, the trackers. `record_writer.py` writes it. Imports no torch."""

from __future__ import annotations

import json
import logging
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, cast, get_args

from hydraloop.files.atomic import open_regular

log = logging.getLogger(__name__)

FILENAME = "metrics.jsonl"
"""Its name in every run directory."""
STAMP = "timestamp"
"""The last entry of each line: seconds since 1970."""
NONFINITE = "nonfinite"
"""The entry with the names of values that are null because JSON has no NaN and infinity."""
OBJECTS = "objects"
"""The entry with the files that a record announces: `[{"kind": "image", "name": "predictions", "path": "media/…"}]`."""
_PERFORMANCE = frozenset({"eta", "time", "data_time", "samples_per_second", "memory", "skipped"})
"""Values of the logger's training records that describe the speed, not the model."""
_CHUNK = 1 << 16
_BATCH = 1000
"""Number of records that `read_all` reads at once."""
_MOST = 1 << 63
"""Services accept only smaller iterations and epochs."""


ObjectKind = Literal["image", "text", "table", "histogram", "artifact"]


@dataclass(frozen=True, slots=True)
class LoggedObject:
    """A file that a record announces, such as a picture."""

    kind: ObjectKind
    """A histogram's file is JSON, several histograms by name (`engine/records/records.py`). A table's file is JSON,
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
    is_damaged: bool = False
    """Whether the line is not a record that hydraloop has written. It then has no values."""

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

    A line that is not a record of hydraloop counts as an empty record. Only the first one is a warning.

    Args:
        path: of the log. It need not exist yet.
        position: where to begin.
    """

    def __init__(self, path: Path, position: Position) -> None:
        self._path = path
        self.position = position
        """Where `read` begins. It may be changed."""
        self._iteration = 0
        """Of the last record; used for a record without an iteration."""
        self._warned = False

    def read(self, most: int) -> tuple[list[Record], Position]:
        """Return at most `most` of the next complete lines, and the position after them. The reader does not move."""
        records: list[Record] = []
        offset, index = self.position.offset, self.position.index
        try:
            file = open_regular(self._path)
        except FileNotFoundError:
            return [], self.position
        with file:
            file.seek(offset)
            while len(records) < most:
                line = file.readline()
                if not line.endswith(b"\n"):
                    break
                try:
                    record = _parse(line, index, self._iteration)
                except Exception as error:  # edited by a user
                    record = Record(index, "train", 0, self._iteration, 0.0, {}, {}, is_damaged=True)
                    self._warn(index, error)
                records.append(record)
                self._iteration = record.iteration
                offset, index = offset + len(line), index + 1
        return records, Position(offset, index)

    def _warn(self, index: int, error: Exception) -> None:
        if not self._warned:
            log.warning("%s, line %d is not a record and is ignored: %s", self._path.name, index + 1, error)
        self._warned = True

    def find(self, index: int) -> Position:
        """Return the position before line `index`."""
        offset = 0
        if index:
            with open_regular(self._path) as file:
                offset = sum(len(file.readline()) for _ in range(index))
        return Position(offset, index)


def count(path: Path) -> int:
    """Return the number of complete lines in a log."""
    try:
        with open_regular(path) as file:
            return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(_CHUNK), b""))
    except FileNotFoundError:
        return 0


def is_after(mode: str, at: int, *, iteration: int, last_validation: int) -> bool:
    """Return whether a run that continues at a position makes a record again.

    Args:
        mode: of the record.
        at: its iteration.
        iteration: of the position.
        last_validation: iteration of the last validation before the position.
    """
    return at > iteration or (at == iteration and (mode == "test" or (mode == "val" and last_validation < iteration)))


def read_all(path: Path) -> Iterator[Record]:
    """Yield every record of a log."""
    reader = Reader(path, Position())
    while (read := reader.read(_BATCH))[0]:
        yield from read[0]
        reader.position = read[1]


def read_some(path: Path, most: int) -> list[Record]:
    """Return evenly spread records of a log of any length: of each kind `most` / 2 to `most`, and the last one.

    Records of one kind have the same mode and begin with the same name. Takes about 10 s for a million records.
    """
    kept: defaultdict[tuple[str, str], list[Record]] = defaultdict(list)
    seen, steps, last = Counter[tuple[str, str]](), dict[tuple[str, str], int](), dict[tuple[str, str], Record]()
    for record in read_all(path):
        if record.is_damaged:
            continue
        kind = record.mode, next(iter((*record.values, *record.texts)), "")
        last[kind] = record
        if seen[kind] % steps.setdefault(kind, 1) == 0:
            kept[kind].append(record)
        if len(kept[kind]) > most:
            kept[kind], steps[kind] = kept[kind][::2], steps[kind] * 2
        seen[kind] += 1
    found = {record.index: record for records in (*kept.values(), last.values()) for record in records}
    return [found[index] for index in sorted(found)]


def read_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Return the records of a run that have numbers or texts, each as one flat dict."""
    return [
        {"mode": one.mode, "epoch": one.epoch, "iteration": one.iteration}
        | one.values
        | one.texts
        | {STAMP: one.timestamp}
        for one in read_all(run_dir / FILENAME)
        if one.values or one.texts
    ]


def read_end(path: Path, size: int) -> list[Record]:
    """Return the complete records in the last `size` bytes of a log, with index 0.

    Raises:
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - size))
        lines = file.read(size).split(b"\n")[:-1]  # the last one has no end yet
    records = []
    for line in lines:
        with suppress(Exception):  # the first one has no beginning; a user may have edited others
            records.append(_parse(line, 0, -1))
    return [record for record in records if record.iteration >= 0]


def _parse(line: bytes, index: int, iteration: int) -> Record:
    """Return a line as a record. A record without an iteration gets that of the record before it.

    Raises:
        Exception: the line is not a record that hydraloop has written.
    """
    entries = json.loads(line)
    if b"\\ud" in line:  # half a surrogate pair, which services refuse
        entries = json.loads(json.dumps(entries, ensure_ascii=False).encode("utf-8", "replace"))
    mode, named = str(entries.pop("mode", "train")), entries.pop(NONFINITE, {})
    epoch, at, stamp = entries.pop("epoch", 0), entries.pop("iteration", iteration), entries.pop(STAMP, 0.0)
    if not math.isfinite(stamp):
        raise ValueError("its timestamp is not finite")
    objects = tuple(_object(mode=mode, **one) for one in entries.pop(OBJECTS, ()))
    texts = {name: value for name, value in entries.items() if isinstance(value, str)}
    numbers = {name: value for name, value in entries.items() if value is not None and name not in texts}
    values = {name: float(value) for name, value in {**numbers, **named}.items()}
    epoch, at = epoch if _is_count(epoch) else 0, at if _is_count(at) else iteration  # a hook may log epoch 1.5
    return Record(index, mode, epoch, at, stamp, values, texts, objects)


def _object(*, mode: str, kind: str, name: str, path: str) -> LoggedObject:
    """Return a file that a record announces.

    Raises:
        ValueError: it is outside the run directory, or of an unknown kind.
    """
    if kind not in get_args(ObjectKind) or PurePosixPath(path).is_absolute() or ".." in path.split("/"):
        raise ValueError(f"it announces a file that is refused, {path}")
    return LoggedObject(cast(ObjectKind, kind), f"{mode}/{name}", path)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < _MOST
