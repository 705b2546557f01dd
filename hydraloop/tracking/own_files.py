"""Which files of a run directory are sent: a run may come from someone else, and links in it point anywhere."""

from __future__ import annotations

import stat
from pathlib import Path

from hydraloop.tracking.tracker import RefusedError, UnusableError


def own(run_dir: Path, path: Path) -> Path:
    """Return the path of a file below a run directory.

    Raises:
        RefusedError: it is elsewhere, is a link or has another name (a hard link), is below a link, or is no file.
        FileNotFoundError: it does not exist.
    """
    if not _is_below(run_dir, path.parent):
        raise RefusedError(f"{path} is not in the run directory, or is below a link")
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        raise RefusedError(f"{path} is a link, or no file")
    return path


def own_folder(run_dir: Path, folder: Path) -> None:
    """Create a folder of a run directory if it does not exist.

    Raises:
        UnusableError: it is a link or below one, or no folder.
    """
    if not _is_below(run_dir, folder):
        raise UnusableError(f"{folder} is a link, or below a link: remove it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UnusableError(f"{folder} is not a folder: move it away") from error


def _is_below(run_dir: Path, folder: Path) -> bool:
    """Return whether a folder is in a run directory and not below a link there."""
    run_dir, folder = run_dir.absolute(), folder.absolute()
    return folder.is_relative_to(run_dir) and folder.resolve() == run_dir.resolve() / folder.relative_to(run_dir)
