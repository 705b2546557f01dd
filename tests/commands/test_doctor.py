"""`hydraloop doctor`: what is fine on this machine, what is not, and what to do."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from tests.e2e.projects import Project
from tests.slurm import Slurm


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A copy of the repository's project."""
    return Project.make(tmp_path_factory.mktemp("doctor") / "project")


def lines(out: str) -> dict[str, str]:
    """What is said of each name."""
    return {line.split()[0]: line for line in out.splitlines() if not line.startswith(" ")}


def test_a_healthy_machine_and_project(project: Project) -> None:
    before = project.files
    done = project.python("-m", "hydraloop", "doctor", "hooks=mlflow", "precision=bf16", "engine.device=cpu")
    assert done.code == 0, done.text
    names = ["config", "versions", "device", "precision", "ranks", "write", "disk", "mlflow"]
    assert list(lines(done.out)) == names
    assert all(line.split()[1] == "ok" for line in lines(done.out).values())
    assert "torch 2" in lines(done.out)["versions"]
    assert "bf16 on cpu" in done.out
    assert project.files == before


def test_problems_have_a_remedy_and_the_rest_is_still_tested(project: Project) -> None:
    done = project.python("-m", "hydraloop", "doctor", "engine.device=cuda:9", "hydra.run.dir=/proc/x")
    assert done.code == 1
    assert "device      problem     engine.device: this machine has no cuda:9\n" in done.out
    assert "write       problem     hydra.run.dir: /proc cannot be written" in done.out
    done = project.python("-m", "hydraloop", "doctor", "optimizer.lrr=1")
    assert done.code == 1
    assert "config      problem     optimizer.lrr: " in done.out
    assert "disk        ok" in done.out


def test_outside_of_a_project_a_script_of_another_framework_is_not_run(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.write("train.py", "open('trained', 'w')\n")
    done = project.python("-m", "hydraloop", "doctor")
    assert done.code == 0, done.text
    assert "no project here" in done.out
    assert project.files == {"train.py"}


def test_a_service_that_is_silent_is_not_waited_for_and_no_secret_is_shown(project: Project) -> None:
    with socket.socket() as silent:
        silent.bind(("localhost", 0))
        silent.listen()  # accepts, and never answers
        address = f"http://me:sesame-open@localhost:{silent.getsockname()[1]}"
        began = time.monotonic()
        done = project.python("-m", "hydraloop", "doctor", "hooks=mlflow", f"hooks.mlflow.tracking_uri={address}")
    assert done.code == 1
    assert f"no MLflow at http://localhost:{address.rpartition(':')[2]}/health" in lines(done.out)["mlflow"]
    assert "sesame" not in done.text
    assert time.monotonic() - began < 60


@pytest.mark.slow
def test_slurm_and_what_its_nodes_see(project: Project, slurm: Slurm) -> None:
    done = project.python("-m", "hydraloop", "doctor", "sweep.max_workers=4", "sweep.submitit.timeout_min=9")
    assert done.code == 0, done.text
    asked = "A sweep asks for 4 jobs at a time (timeout_min=9)"
    assert lines(done.out)["slurm"] == f"slurm       ok          main: up, 2 nodes, at most infinite. {asked}"
    assert "sees the project's folder and its Python" in lines(done.out)["nodes"]
    done = project.python("-m", "hydraloop", "doctor", "sweep.submitit.slurm_partition=gpu")
    assert "slurm       problem     sweep.submitit.slurm_partition: there is no partition gpu, only main" in done.out
    assert "not judged  no job has started on a node: srun: error: " in lines(done.out)["nodes"]
