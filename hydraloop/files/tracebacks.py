"""Tracebacks in the terminal: without the frames of packages, if the user's own code has raised the error."""

from __future__ import annotations

import os
import re
import sysconfig
from itertools import groupby
from pathlib import Path

_BLOCK = re.compile(r"(?<=^Traceback \(most recent call last\):\n)(?:  .*\n)+", re.MULTILINE)
_PATH = re.compile(r'^  File "(.*?)"', re.MULTILINE)

_HINT = "  train.log has all frames. To look at the variables in a debugger, add --pdb to the command."


def of_user(text: str) -> str:
    """Return a text in which each traceback has only the frames of the user's code, and the last frame.

    A text without a frame of the user's code is unchanged, and so is every one with HYDRA_FULL_ERROR=1.
    """
    paths = [path for block in _BLOCK.findall(text) for path in _PATH.findall(block)]
    if os.environ.get("HYDRA_FULL_ERROR") == "1" or not any(map(_is_of_user, paths)):
        return text
    return f"{_BLOCK.sub(_shortened, text)}\n{_HINT}"


def _shortened(block: re.Match[str]) -> str:
    starts = [found.start() for found in _PATH.finditer(block[0])]
    frames = [block[0][start:end] for start, end in zip(starts, [*starts[1:], None], strict=True)]
    shown = [*(_is_of_user(path) for path in _PATH.findall(block[0])[:-1]), True]
    parts: list[str] = []
    for is_shown, group in groupby(zip(shown, frames, strict=True), key=lambda pair: pair[0]):
        found = [frame for _, frame in group]
        parts += found if is_shown else [f"  … {len(found)} frames of hydraloop and packages\n"]
    return "".join(parts)


def _is_of_user(path: str) -> bool:
    packages = (str(Path(__file__).resolve().parents[1]) + os.sep, sysconfig.get_paths()["stdlib"] + os.sep, "<")
    return not path.startswith(packages) and not {"site-packages", "dist-packages"} & set(Path(path).parts)
