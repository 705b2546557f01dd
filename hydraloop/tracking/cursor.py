"""What a sender keeps in the run directory: its cursor, which is its position in the log, and its lock.

Each tracker of a run has at most one sender. It holds the lock until it ends; the system then releases the lock.
"""

from __future__ import annotations

import json
import logging
import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydraloop.files import atomic
from hydraloop.files.atomic import read_json
from hydraloop.files.environment import of_project, without_project
from hydraloop.files.metrics_log import FILENAME, count
from hydraloop.tracking.tracker import FOLDER

if TYPE_CHECKING:
    from filelock import BaseFileLock

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Cursor:
    """The contents of `<run_dir>/tracking/<hook name>.cursor.json`. Only the holder of the lock writes it."""

    kind: str
    """Dotted path of the tracker."""
    index: int = 0
    """Lines of the log that are processed."""
    refused: list[int] = field(default_factory=list)
    """Lines that the service has refused."""
    cuts: int = 0
    """Number of cuts of the log that the service knows of."""
    attempt: int = -1
    """Number of the last attempt that the service knows of; -1: none."""
    complete: bool = False
    """Whether the service has all records and files of that attempt, and knows how it ended."""
    where: str | None = None
    """Where a person finds the run: an address or a command."""
    trouble: str | None = None
    """What does not work now; None if everything works."""
    remarks: list[str] = field(default_factory=list)
    """Warnings for the terminal of the run."""
    memory: dict[str, Any] = field(default_factory=dict)
    """The tracker's own state."""

    @property
    def sent(self) -> int:
        """Number of records that were sent, or left out by `interval`."""
        return self.index - len(self.refused)

    def save(self, run_dir: Path, name: str) -> None:
        """Write the cursor atomically."""
        atomic.write_text(path_of(run_dir, name), json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, run_dir: Path, name: str) -> Cursor | None:
        """Read the cursor of a tracker hook. Returns None if the file does not exist or is damaged."""
        path = path_of(run_dir, name)
        try:
            return cls(**read_json(path))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, AttributeError) as error:
            log.warning("%s cannot be read (%s): all records count as not sent", path, error)
            return None


def is_complete(run_dir: Path, name: str, attempt: int) -> bool:
    """Return whether a tracker has everything that a run has after the attempt of a number."""
    cursor = Cursor.load(run_dir, name)
    if cursor is None or not cursor.complete or cursor.attempt != attempt:
        return False
    return cursor.index >= count(run_dir / FILENAME)


def sync_command(folder: Path, kind: str) -> str:
    """Return the command that sends what a tracker of this kind does not have of a run or sweep."""
    if kind.startswith("hydraloop."):
        return without_project("sync", folder)
    return shlex.join(of_project("sync", folder))


def path_of(run_dir: Path, name: str) -> Path:
    """Return the path of a tracker hook's cursor."""
    return run_dir / FOLDER / f"{name}.cursor.json"


def run_dirs(folder: Path) -> list[Path]:
    """Return the runs with a tracker in a folder and below it, `2` before `10`."""
    found = {path.parent.parent for path in folder.rglob(f"{FOLDER}/run.json")}
    return sorted(found, key=lambda path: [(len(part), part) for part in path.parts])


def lock_of(run_dir: Path, name: str) -> BaseFileLock:
    """Return the lock of a tracker hook's sender."""
    from filelock import FileLock  # imported here, because the command line does not need it

    return FileLock(run_dir / FOLDER / f"{name}.lock")
