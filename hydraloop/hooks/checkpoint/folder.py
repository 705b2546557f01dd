"""The folder that a run's checkpoints go to, and how their paths survive a move of it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from hydraloop.errors import UserError
from hydraloop.run import atomic
from hydraloop.run import directory as run_directory
from hydraloop.run.checkpoint_files import RUN_DIR_FILE, SUFFIX, point_to


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """A folder of checkpoints.

    Args:
        path: the folder; made by `open`.
        resumed_beside: the folder of the checkpoint that the run was resumed from, None for a new run.
    """

    path: Path
    resumed_beside: Path | None = None

    def open(self, run_dir: Path, default: Path, *, key: str) -> None:
        """Make the folder and try to write into it; leave the way back to the run where it is not `default`.

        Raises:
            UserError: it cannot be written to, has the checkpoints of another run, or is one of Python's; names `key`.
        """
        if self.path.resolve().name in ("site-packages", "dist-packages"):
            raise UserError(
                f"Python reads .pth files in {self.path} at its start, and would take checkpoints for its own",
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
        # A run that continues from a file in this folder is the one whose folder it is; it may have been moved.
        goes_on = self.resumed_beside is not None and self.resumed_beside.resolve() == self.path.resolve()
        if owner != run_dir and not goes_on and any(self.path.glob(f"*{SUFFIX}")):
            raise UserError(
                f"{self.path} has checkpoints of another run, {owner}, which would be overwritten",
                key=key,
                remedy="Use a folder of its own for each run.",
            )
        atomic.write_text(self.path / RUN_DIR_FILE, f"{run_dir}\n")

    def resume_from(self, path: Path, run_dir: Path) -> None:
        """Make a later start continue from `path` too, also if this one is killed before its first checkpoint.

        Does nothing if the file does not belong to the run.
        """
        folder = path.resolve().parent
        if folder == self.path.resolve() or folder.is_relative_to(run_dir.resolve()):
            point_to(path)

    def relative(self, path: Path) -> str:
        """How a checkpoint's state names a file: relative to the folder where it is in it, so that both can move."""
        return str(path.relative_to(self.path)) if path.is_relative_to(self.path) else str(path.resolve())

    def locate(self, name: str) -> Path:
        """The file that `relative` named: in the folder, or in that of the resumed file where it has changed."""
        here = self.path / name
        if self.resumed_beside is not None and not here.is_file() and (self.resumed_beside / name).is_file():
            return self.resumed_beside / name
        return here


def expanded(out_dir: str | os.PathLike[str]) -> Path:
    """The folder an option names, `~` made out.

    Raises:
        UserError: there is no such user.
    """
    try:
        return Path(out_dir).expanduser()
    except RuntimeError as error:  # ~somebody, whom this machine does not know
        raise UserError(f"{out_dir}: {error}", key="out_dir", remedy="Write the path out.") from None


def in_file_name(metric: str) -> str:
    """A metric's name with everything that has a meaning in paths and globs replaced: `val/acc` becomes `val_acc`."""
    return re.sub(r"[^\w.@=+-]", "_", metric)
