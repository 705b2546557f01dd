"""The checkpoints of a run: their folder, and the list of the files that are kept."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hydraloop.errors import UserError
from hydraloop.files import atomic, run_directory
from hydraloop.files.checkpoint_files import LAST, SUFFIX, UNFINISHED, point_to, remove_old_shards
from hydraloop.files.integrity import SHARDS

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """A folder of checkpoints.

    Args:
        path: the folder; `open` creates it.
    """

    path: Path

    def open(self, run_dir: Path, resumed: Path | None, *, key: str) -> bool:
        """Create the folder, try to write to it, and record it in the run directory.

        Args:
            run_dir: of the run.
            resumed: the folder of the checkpoint that the run is resumed from; None: a new run.
            key: the option that names the folder, for errors.

        Returns:
            Whether `resumed` is a folder of another run, as far as the records of this run tell.

        Raises:
            UserError: it cannot be written to, is a folder of Python packages, or contains checkpoints of another run.
        """
        if self.path.resolve().name in ("site-packages", "dist-packages"):
            raise UserError(
                f"Python reads .pth files in {self.path} when it starts, and would read checkpoints as such",
                key=key,
                remedy="Use another folder.",
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".{os.getpid()}.part"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written to: {error.strerror or error}",
                key=key,
                remedy="Use a folder that you may write to.",
            ) from error

        own = [folder.resolve() for folder in run_directory.checkpoint_folders(run_dir)]
        resumed = None if resumed is None else resumed.resolve()
        if self.path.resolve() not in (*own, resumed) and any(self.path.glob(f"*{SUFFIX}")):
            raise UserError(
                f"{self.path} has checkpoints of another run, which would be overwritten",
                key=key,
                remedy="Use a separate folder for each run.",
            )
        run_directory.record_checkpoint_folder(run_dir, self.path)
        return resumed is not None and resumed not in own

    def remove_unfinished(self) -> None:
        """Remove checkpoints, shards and published files that a killed process left unfinished.

        Only the process that trains in the run directory may call it, before its first save.
        """
        atomic.remove_unfinished(self.path / LAST)
        for folder in self.path.glob(f"*{SHARDS}*"):
            remove_old_shards(self.path / f"{folder.name.rpartition(SHARDS)[0]}{SUFFIX}")
        for part in self.path.glob(".*.part"):
            if not UNFINISHED.fullmatch(part.name):
                continue
            try:
                part.unlink()
            except OSError as error:
                log.warning("%s, unfinished, could not be removed: %s", part, error.strerror or error)

    def resume_from(self, path: Path, run_dir: Path) -> None:
        """Make later starts resume from `path`, even if this run is killed before its first checkpoint.

        Does nothing if the file does not belong to the run.
        """
        folder = path.resolve().parent
        if folder == self.path.resolve() or folder.is_relative_to(run_dir.resolve()):
            point_to(path)

    def relative(self, path: Path) -> str:
        """Return a file's name for a checkpoint's state: relative if it is in the folder, so that both can be moved."""
        return str(path.relative_to(self.path)) if path.is_relative_to(self.path) else str(path.resolve())


@dataclass(frozen=True, slots=True)
class BestFile:
    """The checkpoint of the best validation by one metric."""

    value: float
    iteration: int
    path: Path


@dataclass(frozen=True, slots=True)
class KeptFiles:
    """The checkpoints of a run. It does not change: each save makes a new list."""

    best: Mapping[str, BestFile] = field(default_factory=dict)
    """By metric."""
    regular: tuple[Path, ...] = ()
    """Regular files, oldest first."""
    obsolete: tuple[Path, ...] = ()
    """Files to delete when the newest file is on the disk: best files that a better one replaces, and regular files
    beyond `max_keep_ckpts`."""
    last_saved: int = 0
    """The iteration of the newest regular file."""
    foreign: tuple[Path, ...] = ()
    """Files of other runs from which this run was resumed, with symlinks resolved. They are never deleted."""

    def with_regular(self, path: Path, iteration: int, max_keep: int | None) -> KeptFiles:
        """Add a regular file; the oldest ones beyond `max_keep` become obsolete."""
        regular = (*(other for other in self.regular if other != path), path)
        surplus = 0 if max_keep is None else max(0, len(regular) - max_keep)
        return replace(
            self,
            regular=regular[surplus:],
            obsolete=(*self.obsolete, *regular[:surplus]),
            last_saved=iteration,
        )

    def with_best(self, new: Mapping[str, BestFile]) -> KeptFiles:
        """Set the best file of each of these metrics; those before them become obsolete."""
        replaced = [self.best[metric].path for metric in new if metric in self.best]
        return replace(self, best={**self.best, **new}, obsolete=(*self.obsolete, *replaced))

    def to_delete(self) -> list[Path]:
        """Return the obsolete files that are neither foreign nor in use: two metrics can share a best file."""
        in_use = {*self.regular, *(best.path for best in self.best.values())}
        unused = [path for path in self.obsolete if path not in in_use]
        return [path for path in unused if path.resolve() not in self.foreign] if self.foreign else unused

    def state(self, folder: CheckpointFolder) -> dict[str, Any]:
        """Return plain values, with paths as the folder names them."""
        return {
            "best": {
                metric: {"value": best.value, "iteration": best.iteration, "checkpoint": folder.relative(best.path)}
                for metric, best in self.best.items()
            },
            "regular": [folder.relative(path) for path in self.regular],
            "obsolete": [folder.relative(path) for path in self.obsolete],
            "last_saved": self.last_saved,
            "foreign": [folder.relative(path) for path in self.foreign],
        }

    @classmethod
    def of(cls, state: Mapping[str, Any], folder: Path, metrics: Collection[str]) -> KeptFiles:
        """Return the files of a `state`, with the best files of these metrics.

        A file may be missing, as in a copy of a run: the best value counts all the same.
        """
        return cls(
            best={
                metric: BestFile(entry["value"], entry["iteration"], folder / entry["checkpoint"])
                for metric, entry in state["best"].items()
                if metric in metrics
            },
            regular=tuple(folder / name for name in state["regular"]),
            obsolete=tuple(folder / name for name in state["obsolete"]),
            last_saved=state["last_saved"],
            foreign=tuple((folder / name).resolve() for name in state.get("foreign", ())),
        )
