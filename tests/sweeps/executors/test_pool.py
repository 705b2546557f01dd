"""PoolExecutor: processes of jobs from a fork server. The checks are in `pool_program`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("pool_program.py")
CHECKS = PROGRAM.read_text(encoding="utf-8").split("CHECKS = [")[1].split("]")[0].replace(",", "").split()


def run(*arguments: str) -> dict[str, str]:
    """Return the error of each check that failed."""
    done = subprocess.run([sys.executable, str(PROGRAM), *arguments], capture_output=True, text=True, timeout=120)
    assert done.stdout, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run(str(tmp_path_factory.mktemp("pool")))


@pytest.mark.parametrize("name", CHECKS)
def test_that(name: str, errors: dict[str, str]) -> None:
    assert name not in errors, errors[name]


@pytest.mark.slow
def test_slow_checks(tmp_path: Path) -> None:
    assert run(str(tmp_path), "slow") == {}
