"""Jobs as new Python processes: their environment and arguments, and who has the request."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hydraloop.errors import UserError
from hydraloop.files import environment
from hydraloop.sweeps import job_states
from hydraloop.sweeps.executors import spawned
from hydraloop.sweeps.executors.executor import Request
from hydraloop.sweeps.executors.spawned import Spawn
from tests.e2e.projects import Project
from tests.sweeps.executors import program
from tests.sweeps.executors.test_secrets import THREAD

SECRET = "hunter2-typed"


@pytest.fixture
def _command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_command", ["python", str(program.__file__), "--config-name=mine"])
    monkeypatch.setenv("PYTHONPATH", os.getcwd())


def about(folder: Path) -> Any:
    return json.loads((folder / "about.json").read_text())


def spawn(sweep: Path) -> Spawn:
    return Spawn(sweep, ["a=1,2", f"token={SECRET}"])


@pytest.mark.usefixtures("_command")
def test_a_job_has_its_environment_and_its_log(tmp_path: Path) -> None:
    folder = tmp_path / "sweep" / "3"
    request = Request(3, (f"password={SECRET}", "exit=7"), str(folder), str(folder), gpus=("1", "3"), threads=2)
    process = spawn(tmp_path / "sweep")(request)
    assert os.getsid(process.pid) == process.pid
    assert process.wait(60) == 7
    expected = {"CUDA_VISIBLE_DEVICES": "1,3", "OMP_NUM_THREADS": "2"}
    assert about(folder) == {
        "sweep": str(tmp_path / "sweep"),
        "variables": expected,
        "argv": ["--config-name=mine"],
        "pid": process.pid,
    }
    assert (folder / "job.log").read_text() == f"lines: password={SECRET} exit=7\n"
    assert not (folder / "request.json").exists()


def test_a_request_has_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(0, (f"token={SECRET}", "a=1"), str(tmp_path / "0"), str(tmp_path / "0"), attempt=3)
    path, variables = spawn(tmp_path).write(request)
    assert SECRET not in path.read_text()
    monkeypatch.setenv(environment.SWEEP_JOB, str(path))
    with pytest.raises(UserError, match="the overrides have a secret, which the environment of this job does not have"):
        spawned.read_request()  # sbatch --export=NONE
    for name, value in {**variables, environment.SWEEP_JOB: str(path)}.items():
        monkeypatch.setenv(name, value)
    assert spawned.read_request() == (tmp_path, ["a=1,2", f"token={SECRET}"], request)
    assert not {environment.SWEEP_JOB, "HYDRALOOP_PRIVATE"} & os.environ.keys()
    path.unlink()  # the job has ended
    monkeypatch.setenv(environment.SWEEP_JOB, str(path))
    with pytest.raises(SystemExit) as left:
        spawned.read_request()
    assert left.value.code == 0


@pytest.mark.nightly
def test_a_sweep_of_new_processes(tmp_path: Path) -> None:
    """The program has a thread, so it cannot be forked."""
    project = Project.make(tmp_path / "project")
    program = (project.path / "train.py").read_text()
    project.write("train.py", program.replace("import hydraloop\n", f"{THREAD}\nimport hydraloop\n", 1))
    line = ["-m", "seed=1,2", "experiment=spirals", "engine.max_iters=2", "sweep.max_workers=2"]
    done = project.train(
        *line,
        "hydra.sweep.dir=all",
        "hydra.sweep.subdir=s${seed}",
    )
    assert done.code == 0, done.err
    for number in range(2):
        folder = project.path / "all" / ".jobs" / str(number)
        state = job_states.read(folder)
        assert state is not None
        assert (state.state, state.step, state.directory) == ("finished", 2, f"s{number + 1}")
        overrides = (project.path / "all" / state.directory / ".hydra" / "overrides.yaml").read_text()
        assert f"- seed={number + 1}\n" in overrides
        assert not (folder / "request.json").exists()
