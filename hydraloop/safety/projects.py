"""The projects in which the user has trained, and their runs: the commands for runs trust only these by themselves.

The record is in the user's home, not in the project: an archive could contain any file of a project. Imports no torch.
"""

from __future__ import annotations

import os
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

RUN_FOLDERS = ("outputs", "multirun")
"""Folders of a project that contain its runs, and no code."""


def remember(project: Path, run_dir: Path) -> None:
    """Record that the user has started a run of a project. Without a writable home, nothing is recorded.

    Args:
        project: the folder whose Python files the run's config may name.
        run_dir: of the run.
    """
    with suppress(OSError, RuntimeError):
        entry = _entry(project, run_dir)
        if not entry.exists():
            entry.parent.mkdir(parents=True, exist_ok=True)
            entry.write_text(f"{project.resolve()}\n{run_dir.resolve()}\n", encoding="utf-8")


def owns(project: Path, run_dir: Path) -> bool:
    """Return whether a run belongs to a project in which the user has trained on this account.

    It belongs to the project if it is in one of RUN_FOLDERS, or if it was started in this very directory.
    """
    with suppress(OSError, RuntimeError):
        return _entry(project, run_dir).exists()
    return False


def _entry(project: Path, run_dir: Path) -> Path:
    """Return the file that records a run; runs in RUN_FOLDERS share one.

    Raises:
        RuntimeError: the user has no home.
    """
    project, run_dir = project.resolve(), run_dir.resolve()
    is_inside = any(run_dir.is_relative_to((project / name).resolve()) for name in RUN_FOLDERS)
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    recorded = str(project) if is_inside else f"{project}\0{run_dir}"
    return state / "hydraloop" / "projects" / sha256(recorded.encode("utf-8", "surrogateescape")).hexdigest()
