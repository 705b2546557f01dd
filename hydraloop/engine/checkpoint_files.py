"""Checkpoint files on disk: which are complete, which is the newest. Without torch, so that a start can look first."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

SUFFIX = ".pth"
SAFETENSORS = ".safetensors"
"""Ends the name of a file with nothing but a state dict, which any framework can read."""
PUBLISHED = "_published"
"""Ends the stem of a file made for publishing; such a file cannot be resumed from."""
RUN_DIR_FILE = "run_dir"
"""In a checkpoint directory outside its run: a text file with the run directory's path."""


_NUMBER = re.compile(r"(?:^|_)(epoch|iter)_(\d+)$")


def is_complete(path: Path) -> bool:
    """Whether the file is a whole zip archive, as torch.save writes: its directory stands at the end."""
    try:
        return path.is_file() and zipfile.is_zipfile(path)
    except OSError:
        return False


def newest_complete(directory: Path) -> Path | None:
    """The checkpoint written last among the complete ones of a directory; None where there is none.

    By the number in its name where all have one of the same kind (`epoch_5`, `best_accuracy_epoch_3`): the times of
    files are lost when a run is copied. Else by those.
    """
    candidates = [path for path in directory.glob(f"*{SUFFIX}") if not path.stem.endswith(PUBLISHED)]
    numbers = {path: _NUMBER.search(path.stem) for path in candidates}
    kinds = {None if found is None else found[1] for found in numbers.values()}

    def age(path: Path) -> tuple[int, int, str]:
        found = numbers[path]
        number = int(found[2]) if found is not None and len(kinds) == 1 else 0
        return number, path.stat().st_mtime_ns, path.name

    for path in sorted(candidates, key=age, reverse=True):
        if is_complete(path):
            return path
    return None
