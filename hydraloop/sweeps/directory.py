"""SweepDirectory: `sweep.json`, the folders with states of jobs, and the marks of controllers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from hydraloop.sweeps.axes import Axes
from hydraloop.sweeps.states import JobState

FILENAME = "sweep.json"
CONTROLLERS = "controllers"
"""Folder with a file for each controller: `<host>-<pid>.json`."""


@dataclass(frozen=True, slots=True)
class ControllerMark:
    """A process that starts jobs of the sweep. The modification time of its file is renewed every 10 s."""

    host: str
    machine: str
    pid: int
    since: float | None
    began: float
    workers: int
    detached: bool


@dataclass(frozen=True, slots=True)
class Description:
    """The contents of `sweep.json`. Secrets are masked."""

    uid: str
    created: float
    """Seconds since 1970."""
    command: tuple[str, ...]
    """`("python", "train.py")`, and Hydra's flags."""
    overrides: tuple[str, ...]
    """As typed, with axes."""
    config: str
    """The masked config as YAML, not resolved; without `sweep`, `detach`, `hydra` and the swept keys."""
    subdir: str
    """`hydra.sweep.subdir`, not resolved."""
    axes: Axes
    average: str
    """The swept key over which results are averaged."""
    git: dict[str, Any]
    """`commit`, and `dirty`: whether tracked files differed from it."""
    version: int = 1


class SweepDirectory:
    """The directory of a sweep.

    Args:
        path: absolute.
    """

    def __init__(self, path: Path, description: Description) -> None:
        self.path = path
        self.description = description

    @classmethod
    def create(cls, path: Path, description: Description) -> Self:
        """Write `sweep.json`.

        Raises:
            UserError: it cannot be written.
        """
        raise NotImplementedError

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read `sweep.json`.

        Raises:
            UserError: the directory holds no sweep.
        """
        raise NotImplementedError

    def folder(self, number: int) -> Path:
        """Return where the state, the log and the lock of a job are.

        It is the run directory, if that is named after the number; else `.jobs/<number>`.
        """
        raise NotImplementedError

    def run_dir(self, state: JobState) -> Path:
        """Return the run directory of a job that was started."""
        return self.path / state.directory

    def state(self, number: int) -> JobState:
        """Return the state of a job; `queued` if it was never started."""
        raise NotImplementedError

    def states(self) -> list[JobState]:
        """Return the states of all jobs, queued ones too. 10,000 take 0.2 s."""
        raise NotImplementedError

    def settle(self, number: int, code: int | None) -> JobState:
        """Return the state of a job whose process has ended, after writing it if that process was killed.

        Args:
            code: the exit code, negative for a signal; None if unknown.
        """
        raise NotImplementedError

    def controllers(self) -> list[ControllerMark]:
        """Return the controllers that are alive; those on other machines if their mark was renewed in the last 60 s."""
        raise NotImplementedError
