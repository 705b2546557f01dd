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
    run_dir, path = run_dir.absolute(), path.absolute()
    if not path.is_relative_to(run_dir) or ".." in path.parts:
        raise RefusedError(f"{path} is not in the run directory")
    parents = [parent for parent in path.parents if parent.is_relative_to(run_dir) and parent != run_dir]
    if any(parent.is_symlink() for parent in parents):
        raise RefusedError(f"{path} is below a link")
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        raise RefusedError(f"{path} is a link, or no file")
    return path


def check_folder(folder: Path) -> None:
    """Check that a folder of the run directory may be written to.

    Raises:
        UnusableError: it is a link.
    """
    if folder.is_symlink():
        raise UnusableError(f"{folder} is a link: remove it")
