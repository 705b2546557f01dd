"""Locks in a folder that two machines see through caches."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.shared.machines import Machine, machines

SCRIPT = "tests.faults.shared.taking_turns"


def start(machine: Machine, *arguments: str | Path) -> subprocess.Popen[str]:
    """Start `python -m …` on a machine."""
    return subprocess.Popen(
        [*machine.command, sys.executable, "-m", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.nightly
def test_one_process_has_a_lock(tmp_path: Path) -> None:
    with machines(tmp_path) as both:
        (tmp_path / "real" / "run").mkdir()
        started = [start(one, SCRIPT, one.view / "run", tmp_path / "inside", "25") for one in (*both, *both)]
        try:
            assert [(one.communicate(timeout=100)[0], one.returncode) for one in started] == [("", 0)] * 4
        finally:
            for one in started:
                one.kill()
                one.communicate()
