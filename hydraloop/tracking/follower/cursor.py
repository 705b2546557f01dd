"""Cursor: which of a run's records a tracker has processed, stored on disk."""

from __future__ import annotations

import json
import logging
import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hydraloop.run import atomic
from hydraloop.run.environment import shown
from hydraloop.tracking.follower.locks import FOLDER

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Cursor:
    """The contents of `<run_dir>/tracking/<hook name>.cursor.json`."""

    kind: str
    """Dotted path of the tracker."""
    options: dict[str, Any]
    """The hook's options, with secrets masked, for `sync.py`."""
    offset: int = 0
    """Bytes of the log that are processed."""
    index: int = 0
    """Lines of the log that are processed."""
    refused: list[int] = field(default_factory=list)
    """Lines that the service has refused."""
    cuts: int = 0
    """Number of cuts of the log that the service knows of."""
    attempt: int = -1
    """Number of the last attempt that the service knows of; -1: none."""
    finished: bool = False
    """Whether the service has all records of that attempt and knows how it ended."""
    complete: bool = False
    """Whether the service also has all files of that attempt."""
    where: str | None = None
    """Where a person finds the run: an address or a command."""
    memory: dict[str, Any] = field(default_factory=dict)
    """The tracker's own state."""

    @property
    def sent(self) -> int:
        """Number of records that the service has."""
        return self.index - len(self.refused)

    def save(self, run_dir: Path, name: str) -> None:
        """Write the cursor atomically."""
        atomic.write_text(path_of(run_dir, name), json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, run_dir: Path, name: str) -> Cursor | None:
        """Read the cursor of a tracker hook. Returns None if the file does not exist or is damaged."""
        path = path_of(run_dir, name)
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            return cls(**fields)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, AttributeError) as error:
            log.warning("%s cannot be read (%s): all records count as not sent", path, error)
            return None


def sync_command(run_dir: Path, *flags: str) -> str:
    """Return the command that sends what a run's trackers do not have."""
    return shlex.join(["python", "-m", "hydraloop", "sync", *flags, shown(run_dir)])


def path_of(run_dir: Path, name: str) -> Path:
    """Return the path of a tracker hook's cursor."""
    return run_dir / FOLDER / f"{name}.cursor.json"


def hook_names(run_dir: Path) -> list[str]:
    """Return the names of the tracker hooks that a run has had."""
    return sorted(path.name.removesuffix(".cursor.json") for path in (run_dir / FOLDER).glob("*.cursor.json"))
