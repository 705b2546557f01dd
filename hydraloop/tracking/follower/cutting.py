"""What a resumed run does to the record log: records behind its checkpoint are taken out, into a side file."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hydraloop.run import atomic
from hydraloop.run.record_log import Position, Reader, Record, cut_torn_line, read_all
from hydraloop.tracking.follower.locks import ended

log = logging.getLogger(__name__)

_BATCH = 1000
"""Records read at once."""


@dataclass(frozen=True, slots=True)
class Cut:
    """One cut."""

    number: int
    """From 1."""
    iteration: int
    """Of the checkpoint."""
    offset: int
    """Bytes left in the log."""
    index: int
    """Lines left in the log."""
    records: int
    """Lines taken out."""
    file: str
    """Where they are, beside the log."""


def cut_behind(path: Path, *, iteration: int, last_validation: int) -> Cut | None:
    """Take out what a run that goes on at a checkpoint will do again: the log is then as it was at the checkpoint.

    Those are records of later iterations; and at the checkpoint's own those of the test, which comes again, and of the
    validation where it came after the checkpoint. Followers that an earlier process has left are waited for.

    Args:
        path: of the log.
        iteration: of the checkpoint.
        last_validation: iteration of the last validation that the checkpoint knows of.

    Returns:
        What was cut; None where there was nothing to cut.
    """
    if not path.exists():
        return None
    ended(path.parent)
    cut_torn_line(path)
    reader = Reader(path, Position())
    while True:
        records, kept = reader.read(_BATCH)
        left = next((n for n, one in enumerate(records) if _is_behind(one, iteration, last_validation)), None)
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
    atomic.write_bytes(path.with_name(file), content)  # on the disk before they leave the log
    with _list_of(path).open("a", encoding="utf-8") as listed:
        listed.write(json.dumps(asdict(cut)) + "\n")
    with path.open("rb+") as opened:
        opened.truncate(kept.offset)
    count = f"{cut.records} record{'s' if cut.records > 1 else ''}"
    log.info("%s after iteration %d moved from %s to %s", count, iteration, path.name, file)
    return cut


def cuts(path: Path) -> list[Cut]:
    """All cuts of a log, in order."""
    try:
        lines = _list_of(path).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    return [Cut(**json.loads(line)) for line in lines]


def sent_and_cut(path: Path, index: int, seen: int) -> tuple[int, int, list[Record]]:
    """What became of a follower's place in the log by cuts it has not seen.

    Args:
        index: records it had sent.
        seen: cuts it knows of.

    Returns:
        How many of these are still in the log; the lowest iteration a run went on at; the records that were sent and
        then cut.
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


def _is_behind(record: Record, iteration: int, last_validation: int) -> bool:
    if record.iteration != iteration:
        return record.iteration > iteration
    return record.mode == "test" or (record.mode == "val" and last_validation < iteration)


def _list_of(path: Path) -> Path:
    return path.with_name(f"{path.stem}.cuts{path.suffix}")
