"""Runs on two nodes of a real Slurm, whose processes `srun` starts."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hydraloop.files import lock
from tests.e2e.projects import Project, Run
from tests.processes import until
from tests.slurm import Slurm

LINE = ("experiment=spirals", "distributed.nnodes=2", "engine.test=false")
SRUN = ("srun", "--nodes=2", "--ntasks-per-node=1", sys.executable, "train.py")
SCRIPT = """#!/bin/sh
#SBATCH --nodes=2 --ntasks-per-node=1 --requeue --open-mode=append --output=slurm.log
"""
SLOWLY = "+hooks.slow={_target_: my_project.slow.Slow}"
HOOK = """
import time
import hydraloop

class Slow(hydraloop.Hook):
    def after_train_iter(self, engine, batch_idx, batch, outputs):
        time.sleep(0.1)
"""
KILLED = """
import os, signal
import hydraloop

class Killed(hydraloop.Hook):
    def before_train_iter(self, engine, batch_idx, batch):
        if engine.distributed.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
"""
PATIENCE = 280


def make(folder: Path) -> Project:
    """A project with a hook that leaves time for a kill."""
    project = Project.make(folder / "project")
    project.write("my_project/slow.py", HOOK)
    return project


def srun(project: Project, *overrides: str) -> subprocess.Popen[str]:
    """Start `srun … python train.py …`."""
    return subprocess.Popen(
        [*SRUN, *LINE, *overrides],
        cwd=project.path,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def alone(project: Project, *overrides: str) -> Run:
    """The same run, with two ranks on this machine."""
    done = project.train(
        *LINE, *overrides, "distributed.nnodes=1", "distributed.nproc_per_node=2", "hydra.run.dir=alone"
    )
    assert done.code == 0, done.text
    return Run(project.path / "alone")


def assert_equal(run: Run, other: Run) -> None:
    """Two runs have the same result and the same records."""
    assert run.result["status"] == "finished"
    assert run.result["val_metrics"] == other.result["val_metrics"]
    assert run.result["progress"] == other.result["progress"]
    assert [keys(record) for record in run.records] == [keys(record) for record in other.records]
    assert lock.holder(run.path) is None


def keys(record: dict[str, object]) -> tuple[object, ...]:
    return tuple(record.get(name) for name in ("mode", "iteration", "loss"))


@pytest.mark.slow
def test_a_run_on_two_nodes_equals_one_with_two_ranks_on_one(tmp_path: Path, slurm: Slurm) -> None:
    project = make(tmp_path)
    process = srun(project, "engine.max_epochs=2", "hydra.run.dir=two")
    printed = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 0, printed
    assert printed.count("status ") == 1, "rank 0 reports for all"
    two = Run(project.path / "two")
    assert " on n2" in (two.path / "rank1.log").read_text()
    assert_equal(two, alone(project, "engine.max_epochs=2"))


@pytest.mark.slow
def test_a_killed_rank_on_another_node_is_named(tmp_path: Path, slurm: Slurm) -> None:
    project = make(tmp_path)
    project.write("my_project/killed.py", KILLED)
    process = srun(project, "engine.max_epochs=2", "hydra.run.dir=two", "+hooks.it._target_=my_project.killed.Killed")
    printed = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode, printed
    said = "rank 1 was killed by SIGKILL (out of memory?)"
    assert printed.count(f"error: {said}") == 1, printed
    assert Run(project.path / "two").result["error"] == said


@pytest.mark.nightly
@pytest.mark.parametrize("node", ["n2", "n1"])
def test_after_the_death_of_a_node_the_job_starts_again_and_continues(tmp_path: Path, slurm: Slurm, node: str) -> None:
    project = make(tmp_path)
    line = ("engine.max_epochs=12", SLOWLY)
    whole = alone(project, *line)
    command = shlex.join([*SRUN, *LINE, *line, "hydra.run.dir=two", "resume=auto"])
    project.write("job.sh", f"{SCRIPT}export PYTHONPATH={os.getcwd()}\n{command}\n")
    job = slurm.run("sbatch", "--parsable", f"--chdir={project.path}", str(project.path / "job.sh")).strip()
    checkpoints = project.path / "two" / "checkpoints"
    until((checkpoints / "epoch_2.pth").exists, "the run has no checkpoint", seconds=PATIENCE)
    slurm.kill_node(node)
    until(lambda: " Restarts=1 " in slurm.run("scontrol", "show", "job", job), "Slurm does not see the death")
    slurm.start()
    two = Run(project.path / "two")
    until(lambda: slurm.state(job) == "COMPLETED", "the job does not end", seconds=PATIENCE)
    assert "resume_1" in {path.name for path in (two.path / ".hydra").iterdir()}, "it has not continued"
    assert_equal(two, whole)


@pytest.mark.nightly
def test_a_signal_lets_the_run_save_and_srun_exit_with_75(tmp_path: Path, slurm: Slurm) -> None:
    project = make(tmp_path)
    process = srun(project, "engine.max_epochs=50", SLOWLY, "hydra.run.dir=two", "default_hooks.checkpoint.interval=1")
    until((project.path / "two" / "checkpoints" / "epoch_1.pth").exists, "no checkpoint", process=process)
    (job,) = slurm.run("squeue", "--noheader", "--format=%i").split()
    slurm.run("scancel", "--signal=TERM", job)
    printed = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 75, printed
    result = json.loads((project.path / "two" / "result.json").read_text())
    assert (result["status"], result["reason"]) == ("interrupted", "preempted by SIGTERM")


@pytest.mark.nightly
def test_mistakes_are_told(tmp_path: Path, slurm: Slurm) -> None:
    project = make(tmp_path)
    done = project.train(*LINE)
    assert done.code == 2
    assert "error: distributed.nnodes: 2 nodes need one process on each, and srun has not started this" in done.err
    assert "srun --nodes=2 --ntasks-per-node=1" in done.err
    swept = project.train("-m", *LINE, "seed=0,1")
    assert (swept.code, "each job of a sweep trains on one node" in swept.err) == (2, True), swept.err
