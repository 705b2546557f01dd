"""Tracebacks in the terminal: without the frames of packages, if the user's own code has raised the error."""

from __future__ import annotations

import os
import re
import sysconfig
from itertools import groupby
from pathlib import Path

_BLOCK = re.compile(r"(?<=^Traceback \(most recent call last\):\n)(?:  .*\n)+", re.MULTILINE)
_FRAME = re.compile(r'^  File "', re.MULTILINE)
_PACKAGES = (str(Path(__file__).resolve().parents[1]) + os.sep, sysconfig.get_paths()["stdlib"] + os.sep, "<")

_HINT = "  train.log has all frames. To look at the variables in a debugger, add --pdb to the command."


def of_user(text: str) -> str:
    """Return a text in which each traceback has only the frames of the user's code, and the last frame.

    A traceback without a frame of the user's code is unchanged, and so is every one with HYDRA_FULL_ERROR=1.
    """
    shortened = text if os.environ.get("HYDRA_FULL_ERROR") == "1" else _BLOCK.sub(_shortened, text)
    return text if shortened == text else f"{shortened}\n{_HINT}"


def _shortened(block: re.Match[str]) -> str:
    starts = [found.start() for found in _FRAME.finditer(block[0])]
    frames = [block[0][start:end] for start, end in zip(starts, [*starts[1:], None], strict=True)]
    own = [_is_of_user(frame) for frame in frames]
    if not any(own):
        return block[0]
    shown = [*own[:-1], True]
    parts = []
    for is_shown, group in groupby(zip(shown, frames, strict=True), key=lambda pair: pair[0]):
        found = [frame for _, frame in group]
        parts += found if is_shown else [f"  … {len(found)} frames of hydraloop and packages\n"]
    return "".join(parts)


def _is_of_user(frame: str) -> bool:
    path = frame.split('"', 2)[1]
    return not path.startswith(_PACKAGES) and not {"site-packages", "dist-packages"} & set(Path(path).parts)
