"""RunData: what the files of a run say. Files may be missing, and others may have written them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hydraloop.errors import UserError
from hydraloop.report.curves import Curve, curves
from hydraloop.run_files import attempts, lock
from hydraloop.run_files.config_yaml import loaded
from hydraloop.run_files.environment import shown
from hydraloop.run_files.record_log import FILENAME, LoggedObject, Record, read_some
from hydraloop.run_files.result import Result
from hydraloop.run_files.run_directory import config_file

_POINTS = 2000
"""The most points of a curve. A screen has fewer columns."""


@dataclass(frozen=True)
class RunData:
    """A run."""

    path: Path

    @cached_property
    def name(self) -> str:
        """Return its path, as it is typed."""
        return shown(self.path)

    @cached_property
    def records(self) -> list[Record]:
        """All records of a short run, and evenly spread ones of a long run."""
        return read_some(self.path / FILENAME, _POINTS)

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """The numbers by name."""
        return curves(self.records)

    @cached_property
    def objects(self) -> list[tuple[Record, LoggedObject]]:
        """The pictures, tables and other files, each with its record."""
        return [(record, one) for record in self.records for one in record.objects]

    @cached_property
    def result(self) -> Result | None:
        """How the run has ended; None while it runs."""
        found = Result.read(self.path)
        log, file = self.path / FILENAME, self.path / "result.json"
        if found is not None and lock.holder(self.path) is not None and log.exists():
            # A run that continues has an older result. At its end, it holds the lock until its hooks have returned.
            return found if file.stat().st_mtime >= log.stat().st_mtime else None
        return found

    @property
    def status(self) -> str:
        """How the run has ended, or `running`."""
        if self.result is not None:
            return self.result.status
        return "killed" if lock.holder(self.path) is None else "running"

    @cached_property
    def config(self) -> Any:
        """The config as it was composed, not resolved; None if it cannot be read."""
        file = config_file(self.path)
        try:
            return None if file is None else OmegaConf.to_container(loaded(file, file), resolve=False)
        except UserError:
            return None

    @cached_property
    def typed(self) -> list[str]:
        """What was typed to start the run."""
        return attempts.typed_overrides(self.path)

    def file(self, relative: str) -> Path | None:
        """Return a file of the run; None if it does not exist, or is elsewhere (a link)."""
        path = self.path / relative
        return path if path.is_file() and path.resolve().is_relative_to(self.path.resolve()) else None
