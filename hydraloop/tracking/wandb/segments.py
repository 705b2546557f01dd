"""Segments of a run at W&B. Usually there is one; there may be more if the run, or W&B's own process, starts again.

A segment is one W&B run with one id. Its steps are the lines of the record log.

* Offline, a segment is one file. It cannot be continued, so it is written again from the record log under the same id,
  and the previous file is moved to `wandb/replaced/`.
* Online, the service says which step it has, and the same id continues from there.
* If neither is possible (the file was already uploaded, or the run was online and is offline now), a new segment with
  its own id continues in the same group.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

FOLDER = "wandb"
REPLACED = "replaced"


@dataclass(slots=True)
class Segment:
    """One run at W&B."""

    id: str
    mode: Literal["online", "offline"]
    part: int = 1
    """Number among the run's segments, from 1."""
    first: int = 0
    """Index of the first record that belongs to the segment."""
    next: int = 0
    """Index of the first record that the segment does not have yet."""
    folder: str | None = None
    """Name of the folder of its newest files, in `<run_dir>/wandb/`."""
    attempt: int = 0
    """The last attempt in which the segment was opened."""
    closed: int | None = None
    """The last attempt whose end was sent; None if there is none."""
    url: str | None = None
    artifacts: list[str] = field(default_factory=list)
    """Names of the checkpoints that were sent."""

    def file(self, run_dir: Path) -> Path | None:
        """Return the path of W&B's own file, or None if it does not exist yet."""
        return None if self.folder is None else run_dir / FOLDER / self.folder / f"run-{self.id}.wandb"

    def is_uploaded(self, run_dir: Path) -> bool:
        """Return whether `wandb sync` has uploaded the file, which leaves a mark."""
        file = self.file(run_dir)
        return file is not None and file.with_name(f"{file.name}.synced").exists()


def last(memory: dict[str, Any]) -> Segment | None:
    """Return the segment that records go to, or None if there is none yet."""
    return Segment(**memory["segments"][-1]) if memory.get("segments") else None


def remember(memory: dict[str, Any], segment: Segment) -> None:
    """Store a segment's state in the memory."""
    segments = memory.setdefault("segments", [])
    if segments and segments[-1]["id"] == segment.id:
        segments[-1] = asdict(segment)
    else:
        segments.append(asdict(segment))


def to_open(before: Segment | None, uid: str, mode: Literal["online", "offline"], run_dir: Path) -> Segment:
    """Return the segment to open now, given the last one."""
    if before is None:
        return Segment(uid, mode)
    if before.mode == mode == "online":
        return before
    if before.mode == "offline" and not before.is_uploaded(run_dir):
        return Segment(before.id, mode, before.part, before.first, before.next)
    return new_part(before, uid, mode)


def new_part(before: Segment, uid: str, mode: Literal["online", "offline"]) -> Segment:
    """Return a new segment for the records after `before`, which cannot be continued itself."""
    number = before.part + 1
    return Segment(f"{uid}-{number}", mode, number, before.next, before.next)


def put_away(run_dir: Path, run_id: str, *, but: str | None = None) -> None:
    """Move a segment's offline files to where `wandb sync` does not look, except those in folder `but`."""
    for file in (run_dir / FOLDER).glob(f"offline-run-*/run-{run_id}.wandb"):
        if file.parent.name != but:
            target = run_dir / FOLDER / REPLACED
            target.mkdir(exist_ok=True)
            number = len(list(target.iterdir())) + 1
            file.parent.rename(target / f"{number}-{file.parent.name}")
