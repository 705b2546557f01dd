"""`hydraloop skill`: prints SKILL.md, a page for coding agents. Imports no torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from hydraloop import json_answers

PAGE = Path(__file__).with_name("SKILL.md")


def run(args: argparse.Namespace) -> int:
    """Print the page. Returns the exit code 0."""
    text = PAGE.read_text(encoding="utf-8")
    if args.json:
        json_answers.write("skill", {"page": text})
    else:
        print(text, end="")
    return 0
