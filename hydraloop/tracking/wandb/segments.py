"""Segments of a run at W&B: mostly one, and what becomes of it when the run, or W&B's own process, starts again.

A segment is one W&B run, one id. Its steps are the lines of the record log, so that nothing has to be counted twice.

* Offline, all of it is one file. It cannot be gone on with, but written anew, from the record log: under the same id,
  so that it stays one run, and the file before it moves to `wandb/replaced/`.
* Online, the service says how far it has come, and the same id goes on there.
* Where the earlier part can be neither, since it was uploaded from a file, or was online and now is not to be, a new
  segment with an id of its own goes on behind it, in the same group.
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
    """Its number among the run's segments."""
    first: int = 0
    """The first record that belongs to it."""
    next: int = 0
    """The first record it does not have yet."""
    folder: str | None = None
    """Of its newest files, in `<run_dir>/wandb/`."""
    attempt: int = 0
    """The last attempt that it was opened in."""
    closed: int | None = None
    """The last attempt whose end it has."""
    url: str | None = None
    artifacts: list[str] = field(default_factory=list)
    """Checkpoints it has."""

    def file(self, run_dir: Path) -> Path | None:
        """W&B's own file of it; None where it has none yet."""
        return None if self.folder is None else run_dir / FOLDER / self.folder / f"run-{self.id}.wandb"

    def is_uploaded(self, run_dir: Path) -> bool:
        """Whether its file was uploaded by `wandb sync`, which leaves a mark."""
        file = self.file(run_dir)
        return file is not None and file.with_name(f"{file.name}.synced").exists()


def last(memory: dict[str, Any]) -> Segment | None:
    """The segment that a run's records go to."""
    return Segment(**memory["segments"][-1]) if memory.get("segments") else None


def remember(memory: dict[str, Any], segment: Segment) -> None:
    """Keep a segment's state."""
    segments = memory.setdefault("segments", [])
    if segments and segments[-1]["id"] == segment.id:
        segments[-1] = asdict(segment)
    else:
        segments.append(asdict(segment))


def after(before: Segment | None, uid: str, mode: Literal["online", "offline"], run_dir: Path) -> Segment:
    """The segment to open now, given the last one."""
    if before is None:
        return Segment(uid, mode)
    if before.mode == mode == "online":
        return before
    if before.mode == "offline" and not before.is_uploaded(run_dir):
        return Segment(before.id, mode, before.part, before.first, before.next)
    return _part(before, uid, mode)


def behind(before: Segment, uid: str) -> Segment:
    """A segment behind one that cannot go on."""
    return _part(before, uid, before.mode)


def _part(before: Segment, uid: str, mode: Literal["online", "offline"]) -> Segment:
    number = before.part + 1
    return Segment(f"{uid}-{number}", mode, number, before.next, before.next)


def put_away(run_dir: Path, run_id: str, *, but: str | None = None) -> None:
    """Put offline files of a segment away, but those in folder `but`, where `wandb sync` does not look."""
    for file in (run_dir / FOLDER).glob(f"offline-run-*/run-{run_id}.wandb"):
        if file.parent.name != but:
            target = run_dir / FOLDER / REPLACED
            target.mkdir(exist_ok=True)
            number = len(list(target.iterdir())) + 1
            file.parent.rename(target / f"{number}-{file.parent.name}")
