"""Checkpoint files on disk: which are complete, which was written last. Imports no torch."""

from __future__ import annotations

import re
from pathlib import Path

from hydraloop.run import atomic

SUFFIX = ".pth"
SAFETENSORS = ".safetensors"
"""Suffix of a file with only a state dict, which any framework can read."""
PUBLISHED = "_published"
"""Ends the stem of a published file, which cannot be resumed from."""
LAST = "last_checkpoint"
"""Text file next to the checkpoints: the name of the one that a resumed run continues from."""
RUN_DIR_FILE = "run_dir"
"""Text file in a checkpoint directory outside its run: the path of the run directory."""
_NUMBER = re.compile(r"(?:^|_)(?:epoch|iter)_(\d+)$")


def is_complete(path: Path) -> bool:
    """Return whether the file is a complete zip archive, as torch.save writes. Reads only the end of the file."""
    import zipfile  # 5 ms, which a start without checkpoints does not need

    try:
        return path.is_file() and zipfile.is_zipfile(path)
    except OSError:
        return False


def point_to(path: Path) -> None:
    """Write the name of a checkpoint to `last_checkpoint` next to it, so that a resumed run continues from it.

    Called by rank 0 after the checkpoint is on the disk.

    Raises:
        OSError: the file cannot be written.
    """
    atomic.write_text(path.with_name(LAST), f"{path.name}\n")


def newest_complete(*folders: Path) -> Path | None:
    """Return the complete checkpoint that was written last; None without one.

    In each folder, that is the file named in `last_checkpoint`. This is also right after a copy, which changes
    modification times, and after `resume=…/epoch_2.pth`, which leaves files with higher numbers. If there is no
    `last_checkpoint`, or its file is incomplete, the newest modification time decides, then the number.

    Of several folders, the one with the newest `last_checkpoint` (or checkpoint, without that file) is used.
    """
    found = [one for folder in folders if (one := _written_last(folder)) is not None]
    return max(found)[-1] if found else None


def _written_last(folder: Path) -> tuple[int, int, Path] | None:
    """Return when it was written (in ns), the number in its name, and the file."""
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
    """Return the epoch or iteration in a file's name; 0 if it has none."""
    found = _NUMBER.search(path.stem)
    return 0 if found is None else int(found[1])
