"""Cuts the record log of a resumed run: moves records that were written after its checkpoint to another file.

No follower of an earlier process may read the log meanwhile.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hydraloop.run import atomic
from hydraloop.run.record_log import Position, Reader, Record, read_all
from hydraloop.run.record_writer import cut_torn_line

log = logging.getLogger(__name__)

_BATCH = 1000
"""Number of records that are read at once."""


@dataclass(frozen=True, slots=True)
class Cut:
    """One cut of the log."""

    number: int
    """Number of the cut, from 1."""
    iteration: int
    """Iteration of the checkpoint."""
    offset: int
    """Bytes that remain in the log."""
    index: int
    """Lines that remain in the log."""
    records: int
    """Lines that were moved."""
    file: str
    """Name of the file that they were moved to, in the log's folder."""


def cut_after(path: Path, *, iteration: int, last_validation: int) -> Cut | None:
    """Bring the log to its state at a checkpoint: move the records that the resumed run will write again.

    These are the records of later iterations. Among those of the checkpoint's iteration, they are the records of the
    test, and of the validation if it came after the checkpoint.

    Args:
        path: path of the log.
        iteration: iteration of the checkpoint.
        last_validation: iteration of the last validation before the checkpoint.

    Returns:
        The cut, or None if there was nothing to move.
    """
    if not path.exists():
        return None
    cut_torn_line(path)
    reader = Reader(path, Position())
    while True:
        records, kept = reader.read(_BATCH)
        left = next((n for n, one in enumerate(records) if _is_later(one, iteration, last_validation)), None)
        if left is not None:
            kept = reader.read(left)[1]
        if left is not None or not records:
            break
        reader.move(kept)
    content = path.read_bytes()[kept.offset :]
    if not content:
        return None
    number = len(cuts(path)) + 1
    file = f"{path.stem}.cut_{number}{path.suffix}"
    cut = Cut(number, iteration, kept.offset, kept.index, content.count(b"\n"), file)
    atomic.write_bytes(path.with_name(file), content)  # on disk before the log is truncated
    with _list_of(path).open("a", encoding="utf-8") as listed:
        listed.write(json.dumps(asdict(cut)) + "\n")
    with path.open("rb+") as opened:
        opened.truncate(kept.offset)
    count = f"{cut.records} record{'s' if cut.records > 1 else ''}"
    log.info("%s after iteration %d moved from %s to %s", count, iteration, path.name, file)
    return cut


def cuts(path: Path) -> list[Cut]:
    """Return all cuts of a log, in order."""
    try:
        lines = _list_of(path).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    return [Cut(**json.loads(line)) for line in lines]


def sent_and_cut(path: Path, index: int, seen: int) -> tuple[int, int, list[Record]]:
    """Apply the cuts that a follower has not seen to its position in the log.

    Args:
        index: number of records that the follower has sent.
        seen: number of cuts that it knows of.

    Returns:
        The number of sent records that are still in the log; the lowest iteration at which the run resumed; the records
        that were sent and then cut.
    """
    gone: list[Record] = []
    iterations = []
    for cut in cuts(path)[seen:]:
        if index > cut.index:
            gone += _of(cut, path)[: index - cut.index]
            iterations.append(cut.iteration)
            index = cut.index
    return index, min(iterations, default=0), gone


def _of(cut: Cut, path: Path) -> Sequence[Record]:
    return read_all(path.with_name(cut.file))


def _is_later(record: Record, iteration: int, last_validation: int) -> bool:
    if record.iteration != iteration:
        return record.iteration > iteration
    return record.mode == "test" or (record.mode == "val" and last_validation < iteration)


def _list_of(path: Path) -> Path:
    return path.with_name(f"{path.stem}.cuts{path.suffix}")
