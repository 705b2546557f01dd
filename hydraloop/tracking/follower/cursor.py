"""Cursor: how far a tracker has come with a run's records, on disk."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hydraloop.run import atomic
from hydraloop.tracking.follower.locks import FOLDER

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Cursor:
    """The contents of `<run_dir>/tracking/<hook name>.cursor.json`."""

    kind: str
    """`mlflow`, `wandb` or `tensorboard`."""
    options: dict[str, Any]
    """The hook's, secrets masked: what `sync.py` goes by."""
    offset: int = 0
    """Bytes of the log that are done with."""
    index: int = 0
    """Lines of the log that are done with."""
    refused: list[int] = field(default_factory=list)
    """Lines that the service would not take."""
    cuts: int = 0
    """Cuts of the log that the service knows of."""
    attempt: int = -1
    """The last attempt that the service was told of."""
    finished: bool = False
    """Whether the service knows how that attempt ended, with all its records."""
    where: str | None = None
    """Where a person finds the run."""
    memory: dict[str, Any] = field(default_factory=dict)
    """The tracker's own."""

    @property
    def sent(self) -> int:
        """Records that the service has."""
        return self.index - len(self.refused)

    def save(self, run_dir: Path, name: str) -> None:
        """Write it, atomically."""
        atomic.write_text(path_of(run_dir, name), json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, run_dir: Path, name: str) -> Cursor | None:
        """That of a tracker hook; None where it has none yet, or one that a broken disk has left unreadable."""
        path = path_of(run_dir, name)
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            fields.pop("log", None)  # The name of the record log, from when it was an option.
            return cls(**fields)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, AttributeError) as error:
            log.warning("%s cannot be read (%s): it is as if nothing had been sent", path, error)
            return None


def path_of(run_dir: Path, name: str) -> Path:
    """The file of a tracker hook's cursor."""
    return run_dir / FOLDER / f"{name}.cursor.json"


def names(run_dir: Path) -> list[str]:
    """Names of the tracker hooks that have followed a run."""
    return sorted(path.name.removesuffix(".cursor.json") for path in (run_dir / FOLDER).glob("*.cursor.json"))
