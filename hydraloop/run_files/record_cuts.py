"""Cuts the record log of a resumed run: moves records that were written after its checkpoint to another file.

No follower of an earlier process may read the log meanwhile.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from hydraloop.run_files import atomic
from hydraloop.run_files.record_log import Position, Reader, is_after, read_all
from hydraloop.run_files.record_writer import cut_torn_line

log = logging.getLogger(__name__)


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


def cut_after(path: Path, *, iteration: int, last_validation: int, written: int | None = None) -> Cut | None:
    """Bring the log to its state at a checkpoint: move the records that the resumed run will write again.

    These are the records of later iterations. Among those of the checkpoint's iteration, they are the records of the
    test, and of the validation if it came after the checkpoint. A warning says how many of the others are missing.

    Args:
        path: path of the log.
        iteration: iteration of the checkpoint; -1: without a checkpoint; all records are moved.
        last_validation: iteration of the last validation before the checkpoint.
        written: number of records that the run had written at the checkpoint; None if it is not known.

    Returns:
        The cut, or None if there was nothing to move.
    """
    cut_torn_line(path)
    left, readable = None, 0
    for record in read_all(path):
        if is_after(record.mode, record.iteration, iteration=iteration, last_validation=last_validation):
            left = record.index
            break
        readable += not record.is_damaged
    if written is not None and readable < written:
        text = "%s lacks %d of the %d records up to iteration %d: lines are missing or damaged"
        log.warning(text, path.name, written - readable, written, iteration)
    if left is None:
        return None
    kept = Reader(path, Position()).find(left)
    content = path.read_bytes()[kept.offset :]
    number = len(cuts(path)) + 1
    file = f"{path.stem}.cut_{number}{path.suffix}"
    cut = Cut(number, iteration, kept.offset, kept.index, content.count(b"\n"), file)
    atomic.write_bytes(path.with_name(file), content)  # on disk before the log is truncated
    with _list_of(path).open("a", encoding="utf-8") as listed:
        listed.write(json.dumps(asdict(cut)) + "\n")
    with path.open("rb+") as opened:
        opened.truncate(kept.offset)
    moved = f"{cut.records} record{'s' if cut.records > 1 else ''}"
    log.info("%s after iteration %d moved from %s to %s", moved, max(iteration, 0), path.name, file)
    return cut


def cuts(path: Path) -> list[Cut]:
    """Return all cuts of a log, in order."""
    try:
        lines = _list_of(path).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    return [Cut(**json.loads(line)) for line in lines]


def still_there(path: Path, index: int, seen: int) -> int:
    """Return how many of the first `index` records are still in the log after the cuts that follow the first `seen`."""
    return min([index, *(cut.index for cut in cuts(path)[seen:])])


def _list_of(path: Path) -> Path:
    return path.with_name(f"{path.stem}.cuts{path.suffix}")
