"""The folder of a run's checkpoints, with paths that stay valid if it is moved."""

from __future__ import annotations

import logging
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from hydraloop.errors import UserError
from hydraloop.run_files import atomic, run_directory
from hydraloop.run_files.checkpoint_files import LAST, RUN_DIR_FILE, SUFFIX, UNFINISHED, point_to, remove_old_shards
from hydraloop.run_files.integrity import SHARDS

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """A folder of checkpoints.

    Args:
        path: the folder; `open` creates it.
        resumed_beside: the folder of the checkpoint that the run was resumed from; None for a new run.
    """

    path: Path
    resumed_beside: Path | None = None

    def open(self, run_dir: Path, default: Path, *, key: str) -> None:
        """Create the folder and try to write to it; if it is not `default`, write a file that names the run.

        Raises:
            UserError: it cannot be written to, is a folder of Python packages, or contains checkpoints of another run;
                names `key`.
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
            if self.path.resolve() != default.resolve():
                self._point_to(run_dir.resolve(), key)
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written to: {error.strerror or error}",
                key=key,
                remedy="Use a folder that you may write to.",
            ) from error

    def _point_to(self, run_dir: Path, key: str) -> None:
        owner = run_directory.owner(self.path) or run_dir
        # A run that is resumed from a file in this folder owns it; the run may have been moved.
        resumed_here = self.resumed_beside is not None and self.resumed_beside.resolve() == self.path.resolve()
        if owner != run_dir and not resumed_here and any(self.path.glob(f"*{SUFFIX}")):
            raise UserError(
                f"{self.path} has checkpoints of another run, {owner}, which would be overwritten",
                key=key,
                remedy="Use a separate folder for each run.",
            )
        atomic.write_text(self.path / RUN_DIR_FILE, f"{run_dir}\n")

    def remove_unfinished(self) -> None:
        """Remove checkpoints, shards and published files that a killed process left unfinished.

        Only the process that trains in the run directory may call it, before its first save.
        """
        for name in (LAST, RUN_DIR_FILE):
            atomic.remove_unfinished(self.path / name)
        for folder in self.path.glob(f"*{SHARDS}*"):
            remove_old_shards(self.path / f"{folder.name.rpartition(SHARDS)[0]}{SUFFIX}")
        for part in self.path.glob(".*.part"):
            if not UNFINISHED.fullmatch(part.name):
                continue
            try:
                if part.is_dir():
                    shutil.rmtree(part)
                else:
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

    def locate(self, name: str) -> Path:
        """Return the file that `relative` named: in the folder, or else in that of the resumed file."""
        here = self.path / name
        if self.resumed_beside is not None and not here.is_file() and (self.resumed_beside / name).is_file():
            return self.resumed_beside / name
        return here


def in_file_name(metric: str) -> str:
    """Replace characters of a metric's name that are special in paths and globs: `val/acc` becomes `val_acc`."""
    return re.sub(r"[^\w.@=+-]", "_", metric)
