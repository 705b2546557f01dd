"""Some of the random command lines of `command_lines.py`, and how it judges their ends."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_random_command_lines_end_in_success_or_one_message() -> None:
    command = [
        sys.executable,
        "-m",
        "tests.faults.command_lines",
        "--dry-runs=20",
        "--runs=1",
        "--commands=2",
        "--seed=5",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "| all | 23 |" in done.stdout


@pytest.mark.parametrize(
    ("code", "text", "end"),
    [
        (0, "done", "success"),
        (2, "error: seed: out of range\n  Use 0.", "message"),
        (1, "epoch 1\nerror: optimizer: refused", "message"),
        (1, "Traceback (most recent call last):\nerror: x", "traceback"),
        (2, "usage: train.py\ntrain.py: error: x", "no message"),
        (2, "error: a\nerror: b", "several messages"),
        (3, "error: a", "exit code"),
        (0, "error: a", "exit code"),
        (None, "", "hung"),
    ],
)
def test_an_end_is_judged(code: int | None, text: str, end: str) -> None:
    from tests.faults.command_lines import judged  # imports Hypothesis

    assert judged(code, text) == end
