"""Checkpoint files on disk: which are complete, which is the newest. Without torch, so that a start can look first."""

from __future__ import annotations

import zipfile
from pathlib import Path

SUFFIX = ".pth"
PUBLISHED = "_published"
"""Ends the stem of a file made for publishing; such a file cannot be resumed from."""
RUN_DIR_FILE = "run_dir"
"""In a checkpoint directory outside its run: a text file with the run directory's path."""


def is_complete(path: Path) -> bool:
    """Whether the file is a whole zip archive, as torch.save writes: its directory stands at the end."""
    try:
        return path.is_file() and zipfile.is_zipfile(path)
    except OSError:
        return False


def newest_complete(directory: Path) -> Path | None:
    """The checkpoint written last among the complete ones of a directory; None where there is none."""
    candidates = [path for path in directory.glob(f"*{SUFFIX}") if not path.stem.endswith(PUBLISHED)]
    for path in sorted(candidates, key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True):
        if is_complete(path):
            return path
    return None
