"""Checkpoint files on disk: which are complete, which was written last. Does not import torch."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

from hydraloop.run import atomic

SUFFIX = ".pth"
SAFETENSORS = ".safetensors"
"""Ends the name of a file with nothing but a state dict, which any framework can read."""
PUBLISHED = "_published"
"""Ends the stem of a file made for publishing; such a file cannot be resumed from."""
LAST = "last_checkpoint"
"""A text file beside the checkpoints, with the name of the one that a resumed run continues from."""
RUN_DIR_FILE = "run_dir"
"""In a checkpoint directory outside its run: a text file with the run directory's path."""
_NUMBER = re.compile(r"(?:^|_)(?:epoch|iter)_(\d+)$")


def is_complete(path: Path) -> bool:
    """Whether the file is a whole zip archive, as torch.save writes: its directory stands at the end."""
    try:
        return path.is_file() and zipfile.is_zipfile(path)
    except OSError:
        return False


def point_to(path: Path) -> None:
    """Make `last_checkpoint` beside a checkpoint name it, so that a later start continues from it.

    Called by rank 0 after the checkpoint is on the disk.

    Raises:
        OSError: the file cannot be written.
    """
    atomic.write_text(path.with_name(LAST), f"{path.name}\n")


def newest_complete(*folders: Path) -> Path | None:
    """Return the complete checkpoint that was written last; None if there is none.

    In each folder, that is the file that `last_checkpoint` names. It survives a copy of the run, which changes the
    times of files, and it is right after `resume=…/epoch_2.pth`, which leaves files with higher numbers. If a run is
    killed between a checkpoint and `last_checkpoint`, that is the checkpoint before. If there is no such file, or it is
    incomplete, the newest modification time decides, then the number in the name.

    Of several folders, the one counts whose `last_checkpoint` (or else checkpoint) has the newest modification time.
    """
    found = [one for folder in folders if (one := _written_last(folder)) is not None]
    return max(found)[-1] if found else None


def _written_last(folder: Path) -> tuple[int, int, Path] | None:
    """When (in ns), the number in the name, and the file."""
    try:
        name = (folder / LAST).read_text(encoding="utf-8").strip()
        if Path(name).name == name != "" and is_complete(folder / name):
            return (folder / LAST).stat().st_mtime_ns, _number(folder / name), folder / name
    except (OSError, ValueError):
        pass
    candidates = [path for path in folder.glob(f"*{SUFFIX}") if not path.stem.endswith(PUBLISHED)]
    by_age = sorted(((path.stat().st_mtime_ns, _number(path), path) for path in candidates), reverse=True)
    return next((one for one in by_age if is_complete(one[-1])), None)


def _number(path: Path) -> int:
    """Of the epoch or iteration in a file's name; 0 if it has none."""
    found = _NUMBER.search(path.stem)
    return 0 if found is None else int(found[1])
