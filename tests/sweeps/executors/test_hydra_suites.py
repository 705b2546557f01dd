"""Our launcher and our sweeper pass Hydra's own suites, which are in its wheel.

They run in a process of their own, because pytest's process has threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUITES = Path(__file__).with_name("hydra_suites.py")


def passed(tests: str, tmp_path: Path) -> int:
    """Run suites. Returns the number of tests that passed; none may fail or be skipped."""
    (tmp_path / "pytest.ini").touch()
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", "-c", "pytest.ini"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--basetemp=runs", "-k", tests, str(SUITES)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    number, word = done.stdout.splitlines()[-1].split()[:2]
    assert word.startswith("passed"), done.stdout
    return int(number)


@pytest.mark.slow
def test_launchers_and_batches(tmp_path: Path) -> None:
    assert passed("TestLauncher or TestBatches", tmp_path) == 30


@pytest.mark.nightly
def test_scripts(tmp_path: Path) -> None:
    assert passed("TestIntegration", tmp_path) == 33
