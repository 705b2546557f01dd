"""Starting a module of ours in a process of its own. Without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[3]
"""Where hydraloop is imported from."""


def spawn(module: str, *arguments: str, errors: Path) -> subprocess.Popen[bytes]:
    """`python -m module arguments`, with pipes for input and output, in a session of its own.

    Its own session: Ctrl-C is for the process that starts it, which then says what is to be done.

    Args:
        errors: a file that what it prints to stderr is appended to.
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
