"""Checkpoint files on disk: which are complete and undamaged, which was written last. Imports no torch."""

from __future__ import annotations

import logging
import os
import re
import shutil
from functools import cache
from pathlib import Path

from hydraloop.files import atomic
from hydraloop.files.atomic import read_bytes
from hydraloop.files.integrity import SAFETENSORS, SHARDS, damage, shards_of

log = logging.getLogger(__name__)

SUFFIX = ".pth"
PUBLISHED = "_published"
"""Ends the stem of a published file, which cannot be resumed from."""
BEST = "best_"
"""Begins the name of the best checkpoint of a metric (`save_best`)."""
LAST = "last_checkpoint"
"""Text file next to the checkpoints: the name of the one that a resumed run continues from."""
UNFINISHED = re.compile(rf"\..+({re.escape(SUFFIX)}|{re.escape(SAFETENSORS)})\.\d+\.part")
"""Names that `atomic.replacing` gives checkpoints and published files while they are written."""
END_UNWRITTEN = "could not be written: the end of training is lost"
"""In the error of a run whose last checkpoint could not be written, as on a full disk."""
_NUMBER = re.compile(r"(?:^|_)(epoch|iter)_(\d+)$")


def is_complete(path: Path) -> bool:
    """Return whether the file is a complete zip archive, as torch.save writes. Reads only the end of the file."""
    import zipfile  # 5 ms, which a start without checkpoints does not need

    try:
        return path.is_file() and zipfile.is_zipfile(path)
    except (OSError, zipfile.BadZipFile):  # a flipped bit at the end: an archive in several parts
        return False


def point_to(path: Path) -> None:
    """Write the name of a checkpoint to `last_checkpoint` next to it, so that a resumed run continues from it.

    Called by rank 0 after the checkpoint is on the disk.

    Raises:
        OSError: the file cannot be written.
    """
    atomic.write_text(path.with_name(LAST), f"{path.name}\n")


def remove(path: Path) -> None:
    """Delete a file of a run, and the shards of a checkpoint after it: without its `.pth` they are not complete."""
    path.unlink(missing_ok=True)
    remove_old_shards(path)


def remove_old_shards(path: Path) -> None:
    """Delete folders of shards that the `.pth` of their name does not list, or that have none."""
    if path.suffix != SUFFIX:
        return
    names = os.listdir(path.parent)  # after each save: Path.glob takes ten times as long
    folders = [path.with_name(name) for name in names if name.startswith(f"{path.stem}{SHARDS}")]
    current = shards_of(path) if folders and path.is_file() else None
    for folder in folders:
        if current is None or folder != current.folder:
            shutil.rmtree(folder, ignore_errors=True)


def newest_intact(*folders: Path) -> Path | None:
    """Return the undamaged checkpoint that was written last; None without one. Damaged ones get a warning.

    In each folder, that is the file named in `last_checkpoint`. This is also right after a copy, which changes
    modification times, and after `resume=…/epoch_2.pth`, which leaves files with higher numbers. If there is no
    `last_checkpoint`, or its file is damaged or missing, the newest modification time decides, then the number.

    Of several folders, the one with the newest `last_checkpoint` (or checkpoint, without that file) is used first.
    """
    for path in candidates(*folders):
        what = damage(path)
        if what is None:
            return path
        _warn(path, what)
    return None


def intact_before(path: Path) -> Path | None:
    """Return the undamaged checkpoint in the same folder that is used after this one; None without one."""
    files = candidates(path.parent)
    earlier = files[files.index(path) + 1 :] if path in files else []
    return next((file for file in earlier if damage(file) is None), None)


def still_safe(folder: Path) -> str:
    """Return a clause that says which checkpoint a run can continue from, after a save has failed."""
    found = next(filter(is_complete, candidates(folder)), None)
    return f"no checkpoint is in {folder} yet" if found is None else f"the last checkpoint is {found}"


def candidates(*folders: Path) -> list[Path]:
    """Return all checkpoints that a run can continue from, in the order in which they are used.

    They may be damaged, and the one named in `last_checkpoint` may be missing.
    """
    found = [(at[0], files) for folder in folders if (files := _in_order(folder)) for at in files[:1]]
    return [path for _, files in sorted(found, reverse=True) for *_, path in files]


def _in_order(folder: Path) -> list[tuple[int, int, Path]]:
    """Return for each checkpoint when it was written (in ns), the number in its name, and the file."""
    files = _by_age(folder)
    try:
        path = folder / read_bytes(folder / LAST).decode().strip()
        at = (folder / LAST).stat().st_mtime_ns
    except (OSError, ValueError):
        return files
    if path.parent != folder or path.suffix != SUFFIX:
        return files
    kind, number = _count(path)
    named = next((one for one in files if one[-1] == path), (at, number, path))  # or it is missing
    # Files with higher numbers may belong to an earlier part of the run, from before `resume=…/epoch_2.pth`.
    later = [one for one in files if _count(one[-1])[0] == kind and one[1] > number]
    before = [one for one in files if one not in (named, *later)]
    return [(at, *named[1:]), *before, *later]


def _by_age(folder: Path) -> list[tuple[int, int, Path]]:
    paths = [path for path in folder.glob(f"*{SUFFIX}") if not path.stem.endswith(PUBLISHED) and path.is_file()]
    return sorted(((path.stat().st_mtime_ns, _count(path)[1], path) for path in paths), reverse=True)


@cache
def _warn(path: Path, what: str) -> None:
    what = f"damaged ({what})" if path.exists() else "missing"
    log.warning("%s is %s: the checkpoint before it is used", path, what)


def _count(path: Path) -> tuple[str, int]:
    """Return what the number in a file's name counts, `epoch` or `iter`, and the number; `("", 0)` if it has none."""
    found = _NUMBER.search(path.stem)
    return ("", 0) if found is None else (found[1], int(found[2]))
