"""Jobs on Ray: on a real cluster of two nodes on this machine. The checks are in `ray_program`."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hydraloop.errors import UserError
from hydraloop.sweeps.executors import ray_executor

PROGRAM = Path(__file__).with_name("ray_program.py")
CHECKS = PROGRAM.read_text(encoding="utf-8").split("CHECKS = [")[1].split("]")[0].replace(",", "").split()
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install ray")


def run(folder: Path, jobs: int) -> dict[str, str]:
    """Return the error of each check that failed."""
    command = [sys.executable, str(PROGRAM), str(folder), str(jobs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.stdout, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run(tmp_path_factory.mktemp("ray"), 20)


@pytest.mark.slow
@needs_ray
@pytest.mark.parametrize("name", CHECKS)
def test_that(name: str, errors: dict[str, str]) -> None:
    assert name not in errors, errors[name]


@pytest.mark.nightly
@needs_ray
def test_two_hundred_short_jobs(tmp_path: Path) -> None:
    assert run(tmp_path, 200) == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_cpu": 1}, "sweep.ray.num_cpu: no such option\n  Use num_cpus"),
        ({"num_cpus": 0}, "sweep.ray.num_cpus: 0 is not a positive number"),
        ({"memory": "8G"}, "sweep.ray.memory: '8G' is not a positive number\n  For example: sweep.ray.memory=8000"),
        ({"address": "ray://head:10001"}, "sweep.ray.address: the command would not be a part of the cluster"),
    ],
)
@needs_ray
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        ray_executor.check(options)
    assert str(caught.value).startswith(message)


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_executor, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"sweep.executor: .*\n  pip install ray"):
        ray_executor.check({})
