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
from hydraloop.sweeps.sweep_directory import SweepDirectory
from tests.e2e.projects import Project
from tests.faults.sweeps import ray_cluster

SECRET = "hunter2-0123456789"
MINE = f"""
from hydraloop import Hook


class Mine(Hook):
    def __init__(self, api_key: str) -> None:
        assert api_key == "{SECRET}"
"""
TWICE = {"pool": 0, "ray": 2}
"""How many of the options for Ray each sweep has."""
PROGRAM = Path(__file__).with_name("ray_program.py")
CHECKS = PROGRAM.read_text(encoding="utf-8").split("CHECKS = [")[1].split("]")[0].replace(",", "").split()
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install ray")


@pytest.fixture(scope="module")
def errors() -> dict[str, str]:
    """Return the error of each check that failed."""
    with ray_cluster.short_folder() as folder:
        command = [sys.executable, str(PROGRAM), str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.stdout, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@needs_ray
@pytest.mark.parametrize("name", CHECKS)
def test_that(name: str, errors: dict[str, str]) -> None:
    assert name not in errors, errors[name]


@pytest.mark.nightly
@needs_ray
def test_a_sweep_has_the_results_of_the_pool_and_no_file_has_a_secret(tmp_path: Path) -> None:
    project = Project.make(tmp_path / "project")
    project.write("my_project/mine.py", MINE)
    line = ["-m", "seed=1,2", "experiment=spirals", "engine.max_iters=4", "+hooks.mine._target_=my_project.mine.Mine"]
    line += [f"+hooks.mine.api_key={SECRET}", "++hydra.job.env_set.OMP_NUM_THREADS=1"]
    with ray_cluster.short_folder() as folder, ray_cluster.running(folder) as address:
        on_ray = ("sweep.executor=ray", f"sweep.ray.address='{address}'")
        done = [project.train(*line, f"hydra.sweep.dir={name}", *on_ray[:count]) for name, count in TWICE.items()]
        files = [
            path
            for path in (*tmp_path.rglob("*"), *folder.rglob("*"))
            if path.is_file() and not path.name.startswith("mine.")
        ]
        assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert [one.code for one in done] == [0, 0], done[0].text + done[1].text
    values = [[state.value for state in SweepDirectory.load(project.path / name).states()] for name in TWICE]
    assert values[0] == values[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_cpu": 1}, "sweep.ray.num_cpu: no such option\n  Use num_cpus"),
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
