"""Starts a module of hydraloop in a separate process. Does not import torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[3]
"""Folder that hydraloop is imported from."""


def spawn(module: str, *arguments: str, errors: Path) -> subprocess.Popen[bytes]:
    """Start `python -m module arguments` with pipes for stdin and stdout, in a new session.

    In its own session, the process does not receive Ctrl-C. The process that starts it does, and decides what to do.

    Args:
        errors: path of a file to which stderr is appended.
    """
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    errors.parent.mkdir(parents=True, exist_ok=True)
    with errors.open("ab") as opened:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=opened,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
        )
