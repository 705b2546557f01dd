"""The sources of Python's own standard library as bytes: text that is on every machine."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hydraloop.data.split import SPLITS
from hydraloop.errors import UserError

SEPARATOR = 0
"""The byte behind each file: Python refuses sources that contain it, so it means nothing else."""

_SHARES = {"test": (0.0, 0.05), "val": (0.05, 0.1), "train": (0.1, 1.0)}
_LEFT_OUT_ANYWHERE = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"})
"""Byte code, other people's packages, and tests, which distributions leave out or pack apart."""
_LEFT_OUT_ON_TOP = frozenset(
    {
        *("ensurepip", "idlelib", "lib2to3", "tkinter", "turtledemo", "venv"),  # packed apart, as by Debian
        *("asynchat.py", "asyncore.py", "distutils", "imp.py", "smtpd.py"),  # gone since Python 3.12
        *("encodings", "pydoc_data"),  # generated tables and help texts, which are no code
    }
)
_MACHINES_OWN = ("_sysconfigdata", "config-", "sitecustomize", "usercustomize")
"""How names on top begin of what each machine has its own."""


class PythonSources(Dataset[tuple[Tensor, Tensor]]):
    """One part of the `.py` files of the standard library, cut into blocks of bytes, to predict each byte's next one.

    A sample is the tokens int64 `[block_size]` (0..255) and the targets int64 `[block_size]`, the same bytes one
    further on; blocks do not overlap. The files, each followed by a byte 0, are split as files: a hash of the path
    below the root puts one into train (90 %), val (5 %) or test (5 %), and gives the order, so neither depends on
    which other files a machine has. Tests, generated tables and what distributions pack apart are left out; the rest
    is some 8 MB, of which each Python version has its own.

    Args:
        split: `train`, `val` or `test`.
        block_size: T, the tokens of a sample, at least 1.
        root: a folder to take the `.py` files of instead, by the same rules; None for the standard library.
        megabytes: read no more than this many million bytes, above 0, which are a random sample of the files; None
            reads all.

    Raises:
        UserError: an unknown split, a number out of range, or no file, or too little in them for one block.
    """

    def __init__(
        self, split: str, block_size: int = 128, root: str | None = None, megabytes: float | None = 8.0
    ) -> None:
        if split not in SPLITS:
            raise UserError(f"there is no split {split!r}", key="split", remedy=f"Use {', '.join(SPLITS)}.")
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
        """uint8 `[N, block_size + 1]`; the bytes behind the last whole block are left out."""

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One sample: tokens `[T]` and targets `[T]`, int64."""
        block = self.blocks[index].to(torch.int64)
        return block[:-1], block[1:]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """One batch, already stacked: tokens `[B, T]` and targets `[B, T]`, int64 and contiguous."""
        chosen = self.blocks[torch.tensor(indices, dtype=torch.int64)]
        return chosen[:, :-1].to(torch.int64), chosen[:, 1:].to(torch.int64)


def files_of(folder: Path, split: str) -> list[str]:
    """The paths of a part's files below `folder`, with slashes, in the order of their hashes.

    Raises:
        UserError: there is no `.py` file in the folder.
    """
    files = _all_files(folder)
    if not files:
        what = "is no folder" if not folder.is_dir() else "holds no .py files"
        raise UserError(
            f"{folder} {what}",
            key="root",
            remedy="Name a folder with Python sources; this Python may come without those of its own library.",
        )
    first, end = _SHARES[split]
    return [path for share, path in files if first <= share < end]


def _all_files(folder: Path) -> list[tuple[float, str]]:
    """(hash of the path as a number 0..1, path) of each file, ascending."""
    found: list[tuple[float, str]] = []
    for current, folders, names in os.walk(folder):
        below = "" if Path(current) == folder else f"{Path(current).relative_to(folder).as_posix()}/"
        folders[:] = [name for name in folders if not _is_left_out(name, on_top=not below)]
        paths = [below + name for name in names if name.endswith(".py") and not _is_left_out(name, on_top=not below)]
        found += [(_share(path), path) for path in paths]
    return sorted(found)


def _is_left_out(name: str, *, on_top: bool) -> bool:
    """Whether a file or folder of this name is none of the sources; `on_top`: directly in the root."""
    on_top_too = on_top and (name in _LEFT_OUT_ON_TOP or name.startswith(_MACHINES_OWN))
    return name in _LEFT_OUT_ANYWHERE or on_top_too


def _share(path: str) -> float:
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:6], "big") / 2**48


def _read(folder: Path, files: list[str], limit: int | None) -> bytearray:
    """The files one after the other, each with the separator behind it, up to `limit` bytes."""
    text = bytearray()
    for path in files:
        if limit is not None and len(text) >= limit:
            break
        text += (folder / path).read_bytes()
        text.append(SEPARATOR)
    if limit is not None:
        del text[limit:]
    return text
