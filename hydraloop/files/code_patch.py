"""`code.patch`: the uncommitted changes of the code that a run was started with. Imports no torch.

The file stays in the run directory: `<run_dir>/code.patch`, or `<run_dir>/.hydra/resume_<n>/code.patch` for an attempt
to resume. Trackers send it only with `log_code=true`.
"""

from __future__ import annotations

import logging
import zlib
from pathlib import Path

from hydraloop.files import atomic, run_directory
from hydraloop.files.environment import git_commit, git_diff
from hydraloop.files.secrets import mask_text

log = logging.getLogger(__name__)

FILENAME = "code.patch"
_BEGIN = "# Changes since commit "
"""The beginning of each patch."""
_read: dict[Path, tuple[str | None, str | None]] = {}
"""By folder: the commit and the changes that `prepare` has read."""


def prepare(folder: Path) -> dict[str, str | bool]:
    """Ask git once for all jobs of a sweep, in the process that forks them. Their code is that of the sweep's start.

    Returns:
        `commit`, and `dirty`: whether tracked files differ from it. Empty outside a repository.
    """
    commit, diff = _read[folder] = _state(folder)
    return {} if commit is None else {"commit": commit, "dirty": bool(diff)}


def record(run_dir: Path, folder: Path) -> dict[str, str | bool]:
    """Write the patch, and return the entry `git` of `result.json`.

    A patch is complete or not written, because a part of one cannot be applied. If it cannot be made or written, the
    run continues with a warning. A file with this name that is there already is kept.

    Args:
        run_dir: of the run.
        folder: in which the run was started.

    Returns:
        `commit`, `dirty`: whether tracked files differ from it, and if so `patch`: the checksum of the changes. Empty
        outside a repository.
    """
    commit, diff = _read.get(folder) or _state(folder)
    if commit is None:
        return {}
    if diff is None:
        log.warning("git diff failed or took more than 5 s: this run has no %s", FILENAME)
        return {"commit": commit}
    place, content = _place(run_dir), _text(commit, diff).encode("utf-8", "surrogateescape")
    try:
        if diff and not place.exists():
            atomic.write_bytes(place, content)
    except OSError as error:
        log.warning("%s cannot be written: %s", FILENAME, error)
    return {"commit": commit, "dirty": bool(diff), **({"patch": f"{zlib.crc32(content):08x}"} if diff else {})}


def find(run_dir: Path) -> Path | None:
    """Return the patch of the newest attempt; None if its code was committed."""
    path = _place(run_dir)
    return path if path.is_file() else None


def _state(folder: Path) -> tuple[str | None, str | None]:
    commit = git_commit(folder)
    return commit, None if commit is None else git_diff(folder)


def _place(run_dir: Path) -> Path:
    return (run_directory.newest_attempt(run_dir) or run_dir) / FILENAME


def _text(commit: str, diff: str) -> str:
    """Return the masked diff after a comment, which `git apply` ignores."""
    shown = mask_text(diff)
    about = f"{_BEGIN}{commit} in files that git tracks.\n"
    if shown != diff:
        about += "# Secrets are masked as ***, so parts with *** do not apply.\n"
    return about + shown
