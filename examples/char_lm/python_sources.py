"""The sources of Python's standard library as bytes: text that is on every machine."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hydraloop.data.in_memory import SPLITS
from hydraloop.errors import UserError

SEPARATOR = 0
"""The byte after each file. Python refuses sources that contain it."""

_SHARES = {"test": (0.0, 0.05), "val": (0.05, 0.1), "train": (0.1, 1.0)}
_LEFT_OUT_ANYWHERE = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"})
"""Byte code, installed packages, and tests, which some distributions package separately."""
_LEFT_OUT_ON_TOP = {
    *("ensurepip", "idlelib", "lib2to3", "tkinter", "turtledemo", "venv"),  # packaged separately, by Debian and others
    *("asynchat.py", "asyncore.py", "distutils", "imp.py", "smtpd.py"),  # removed in Python 3.12
    *("encodings", "pydoc_data"),  # generated
}
_MACHINES_OWN = ("_sysconfigdata", "config-", "sitecustomize", "usercustomize")
"""Prefixes of files in the root that differ between machines."""


class PythonSources(Dataset[tuple[Tensor, Tensor]]):
    """One part of the `.py` files of the standard library, cut into blocks of bytes, to predict the next byte.

    A sample is the tokens int64 `[block_size]` (0..255) and the targets int64 `[block_size]`, which are shifted by one
    byte. Blocks do not overlap. Each file is followed by a byte 0. A hash of its path in the root assigns a file to
    train (90 %), val (5 %) or test (5 %) and determines the order, so neither depends on the other files. Tests,
    generated tables and what distributions package separately are left out. The rest has about 8 MB, and differs
    between Python versions.

    Args:
        split: `train`, `val` or `test`.
        block_size: T, the tokens of a sample, at least 1.
        root: a folder with `.py` files to use instead, by the same rules; None: the standard library.
        megabytes: read at most this many million bytes, above 0, of a random sample of the files; None: read all.

    Raises:
        UserError: the split is unknown, a number is out of range, or the files are too short for one block.
    """

    def __init__(
        self, split: str, block_size: int = 128, root: str | None = None, megabytes: float | None = 8.0
    ) -> None:
        if split not in SPLITS:
            raise UserError(f"cannot be {split!r}", key="split", remedy=f"Use {', '.join(SPLITS)}.")
        if block_size < 1:
            raise UserError(f"{block_size} is below 1", key="block_size", remedy="Use 1 or more.")
        if megabytes is not None and megabytes <= 0:
            raise UserError(f"{megabytes} is not above 0", key="megabytes", remedy="Use null for no limit.")
        folder = Path(sysconfig.get_paths()["stdlib"]) if root is None else Path(root).expanduser()
        text = _read(folder, files_of(folder, split), None if megabytes is None else int(megabytes * 1e6))
        count = len(text) // (block_size + 1)
        if count == 0:
            raise UserError(
                f"the {split} part of the .py files in {folder} has {len(text)} bytes, too few for a block of "
                f"{block_size} and its next byte",
                key="root",
                remedy="Name a folder with more sources, or use a smaller block_size or more megabytes.",
            )
        self.blocks = torch.frombuffer(text, dtype=torch.uint8)[: count * (block_size + 1)].view(count, block_size + 1)
        """uint8 `[N, block_size + 1]`; the bytes after the last whole block are left out."""

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return one sample: tokens `[T]` and targets `[T]`, int64."""
        block = self.blocks[index].to(torch.int64)
        return block[:-1], block[1:]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Return one stacked batch: tokens `[B, T]` and targets `[B, T]`, int64 and contiguous."""
        chosen = self.blocks[torch.tensor(indices, dtype=torch.int64)]
        return chosen[:, :-1].to(torch.int64), chosen[:, 1:].to(torch.int64)


def files_of(folder: Path, split: str) -> list[str]:
    """Return the paths of a part's files in `folder`, with slashes, in the order of their hashes.

    Raises:
        UserError: there is no `.py` file in the folder.
    """
    files: list[tuple[float, str]] = []
    for current, folders, names in os.walk(folder):
        below = "" if Path(current) == folder else f"{Path(current).relative_to(folder).as_posix()}/"
        folders[:] = [name for name in folders if not _is_left_out(name, on_top=not below)]
        paths = [below + name for name in names if name.endswith(".py") and not _is_left_out(name, on_top=not below)]
        files += [(_share(path), path) for path in paths]
    if not files:
        what = "is not a folder" if not folder.is_dir() else "has no .py files"
        raise UserError(
            f"{folder} {what}",
            key="root",
            remedy="Name a folder with Python sources; this Python may have been installed without them.",
        )
    first, end = _SHARES[split]
    return [path for share, path in sorted(files) if first <= share < end]


def _is_left_out(name: str, *, on_top: bool) -> bool:
    """Return whether a file or folder of this name is left out; `on_top`: directly in the root."""
    return name in _LEFT_OUT_ANYWHERE or (on_top and (name in _LEFT_OUT_ON_TOP or name.startswith(_MACHINES_OWN)))


def _share(path: str) -> float:
    """Return a hash of a path as a number 0..1."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:6], "big") / 2**48


def _read(folder: Path, files: list[str], limit: int | None) -> bytearray:
    """Return the contents of the files, each followed by the separator, up to `limit` bytes."""
    text = bytearray()
    for path in files:
        if limit is not None and len(text) >= limit:
            break
        text += (folder / path).read_bytes() + bytes([SEPARATOR])
    return text[:limit]
