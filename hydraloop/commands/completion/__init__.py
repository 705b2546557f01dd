"""`python -m hydraloop completion bash|zsh|fish`: print what makes a shell complete command lines of hydraloop.

The shell runs `answer.py` at each press of Tab.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def run(args: argparse.Namespace) -> int:
    """Print the lines for a shell's startup file."""
    print(Path(__file__).with_name(f"hydraloop.{args.shell}").read_text(encoding="utf-8"), end="")
    return 0
