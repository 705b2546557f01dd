"""Hydra's `--shell-completion` with hydraloop's options: what a shell gets at a press of Tab."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.e2e.projects import REPOSITORY


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("hooks=ema hooks.ema.mom", "hooks.ema.momentum=\n"),
        ("resume outputs/", ""),
        ("--dry-r", ""),
    ],
)
def test_hydra_completes_options_and_nothing_after_a_command(line: str, words: str) -> None:
    typed = f"python train.py {line}"
    done = subprocess.run(
        [sys.executable, "train.py", "--shell-completion", "query=bash"],
        cwd=REPOSITORY,
        env={**os.environ, "COMP_LINE": typed, "COMP_POINT": str(len(typed))},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, words, "")
