"""Cuts the record log of a resumed run: removes the records that were written after its checkpoint.

A list beside the log says where it was cut, so that senders know which records were replaced. No sender of an earlier
process may read the log meanwhile.
"""

from __future__ import annotations

import logging
from pathlib import Path

from hydraloop.files.record_log import Position, Reader, is_after, read_all
from hydraloop.files.record_writer import cut_torn_line
from hydraloop.files.regular import read_bytes

log = logging.getLogger(__name__)


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
    left, readable, count = None, 0, 0
    for record in read_all(path):
        count += 1
        if left is None and is_after(
            record.mode, record.iteration, iteration=iteration, last_validation=last_validation
        ):
            left = record.index
        readable += left is None and not record.is_damaged
    if written is not None and readable < written:
        text = "%s lacks %d of the %d records up to iteration %d: lines are missing or damaged"
        log.warning(text, path.name, written - readable, written, iteration)
    if left is None:
        return
    kept = Reader(path, Position()).find(left)
    with _list_of(path).open("a", encoding="ascii") as listed:  # first, for a sender after a kill
        listed.write(f"{left}\n")
    with path.open("rb+") as opened:
        opened.truncate(kept.offset)
    removed = f"{count - left} record{'s' if count - left > 1 else ''}"
    log.info("%s after iteration %d removed from %s", removed, max(iteration, 0), path.name)


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
