"""Sweeps and runs on a real Slurm: time limits, requeues, cancelled jobs, killed controllers, the death of a node."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from hydraloop.sweeps.job_states import JobState
from hydraloop.sweeps.sweep_directory import SweepDirectory
from tests.e2e.projects import Done, Project, Run
from tests.e2e.warm import Script
from tests.faults.sweeps.harness import events, make
from tests.faults.sweeps.judge import problems_of_jobs
from tests.marks import nightly, slow
from tests.processes import until
from tests.slurm import Slurm

ON_SLURM = ("sweep.executor=submitit", "sweep.submitit.timeout_min=60")
LONG = "engine.max_iters=1500"
"""Ten seconds without the start, on an idle machine: the ledger waits in each iteration."""
PATIENCE = 600.0
"""Seconds for a sweep on a busy machine. Slurm takes half a minute for a time limit and for the death of a node."""


class OnSlurm:
    """A sweep in a new project."""

    def __init__(self, folder: Path, slurm: Slurm, *line: str) -> None:
        self.project, self.slurm = make(folder / "project"), slurm
        self.line = ("-m", "experiment=kills", "hydra.sweep.dir=all", *ON_SLURM, *line)
        self.path = self.project.path / "all"

    def begin(self, *options: str) -> Script:
        """Start a controller."""
        return self.project.begin(*self.line, *options)

    def run(self, *options: str) -> Done:
        """Run a controller to its end."""
        return self.project.train(*self.line, *options)

    def state(self, number: int = 0) -> JobState:
        """The state of a job."""
        return SweepDirectory.load(self.path).state(number)

    def states(self) -> set[str]:
        """The states of all jobs."""
        return {state.state for state in SweepDirectory.load(self.path).states()}

    def processes(self, number: int = 0) -> int:
        """How many processes of a job have saved a checkpoint. Slurm's requeues are no attempts of the controller."""
        return len({pid for job, pid, event in events(self.path) if (job, event) == (number, "save")})

    def wait_for_saves(self, processes: int = 1, jobs: int = 1) -> None:
        """Wait until so many processes of each job have saved a checkpoint and trained on."""
        until(
            lambda: all(self.processes(number) >= processes for number in range(jobs)),
            "the jobs do not save",
            seconds=PATIENCE,
        )

    def slurm_jobs(self) -> list[str]:
        """The ids of the jobs in Slurm's queue, in the order of their submission."""
        return sorted(self.slurm.run("squeue", "--noheader", "--format=%i").split(), key=int)

    def finish(self, controller: Script) -> None:
        """Wait for the end of the controller: each job has ended once, and nothing is lost or doubled."""
        assert controller.wait(PATIENCE) == 0, controller.printed
        self.check()

    def check(self) -> None:
        """Each job has ended once, and nothing is lost or doubled."""
        assert self.states() == {"finished"}
        jobs = json.loads(self.project.python("-m", "hydraloop", "status", "all", "--json").out)["jobs"]
        assert list(problems_of_jobs(jobs, events(self.path))) == []


@pytest.mark.slow
def test_a_sweep(tmp_path: Path, slurm: Slurm) -> None:
    """Slurm without accounting: sacct is not asked, and nothing warns of it."""
    sweep = OnSlurm(tmp_path, slurm, "seed=0,1")
    done = sweep.run()
    assert done.code == 0, done.text
    assert "sacct" not in done.text
    sweep.check()


@pytest.mark.nightly
def test_a_failed_job_is_not_started_again(tmp_path: Path, slurm: Slurm) -> None:
    sweep = OnSlurm(tmp_path, slurm, "seed=0", "optimizer.lr=1e-2,1e30")
    done = sweep.run()
    assert done.code == 1, done.text
    assert [sweep.state(number).state for number in range(2)] == ["finished", "failed"]
    assert sweep.state(1).attempts == 1


@pytest.mark.nightly
def test_a_time_limit_is_not_a_failure(tmp_path: Path, slurm: Slurm) -> None:
    """The run continues under its id in Slurm, with another limit each time, and without retries."""
    sweep = OnSlurm(tmp_path, slurm, "seed=0", "engine.max_iters=1000000")
    controller = sweep.begin("sweep.submitit.timeout_min=2", "sweep.submitit.slurm_signal_delay_s=60")
    sweep.wait_for_saves(processes=3)
    (job,) = sweep.slurm_jobs()
    assert " Restarts=2 " in slurm.run("scontrol", "show", "job", job)
    assert (sweep.state().state, sweep.state().attempts) == ("running", 1)
    slurm.run("scancel", job)
    assert controller.wait(PATIENCE) == 1, controller.printed


@pytest.mark.parametrize("again", [slow("scancel"), nightly("scontrol requeue")])
def test_an_administrator_ends_or_repeats_a_job(tmp_path: Path, slurm: Slurm, again: str) -> None:
    """A job that was cancelled is not started again, although there are retries. A requeued one uses none."""
    sweep = OnSlurm(tmp_path, slurm, "seed=0", LONG)
    cancels = again == "scancel"
    controller = sweep.begin(f"sweep.max_retries={int(cancels)}")
    sweep.wait_for_saves()
    slurm.run(*again.split(), *sweep.slurm_jobs())
    if cancels:
        assert controller.wait(PATIENCE) == 1, controller.printed
        assert (sweep.state().state, sweep.state().attempts) == ("interrupted", 1)
        assert sweep.state().preempted_by == "SIGTERM"
    else:
        sweep.finish(controller)
        assert sweep.processes() == 2


@pytest.mark.nightly
def test_a_controller_that_was_killed_is_resumed(tmp_path: Path, slurm: Slurm) -> None:
    sweep = OnSlurm(tmp_path, slurm, "seed=0,1", LONG)
    controller = sweep.begin()
    sweep.wait_for_saves(jobs=2)
    controller.kill()
    sweep.finish(sweep.begin("sweep.resume=all"))
    assert {sweep.state(number).attempts for number in range(2)} == {1}


@pytest.mark.nightly
def test_a_second_signal_ends_a_controller_whose_slurm_does_not_answer(tmp_path: Path, slurm: Slurm) -> None:
    sweep = OnSlurm(tmp_path, slurm, "seed=0", LONG)
    controller = sweep.begin()
    sweep.wait_for_saves()
    slurm.kill_slurmctld()
    deadline = time.monotonic() + PATIENCE
    while controller.poll() is None and time.monotonic() < deadline:
        os.kill(controller.pid, signal.SIGTERM)
        time.sleep(1)
    assert controller.returncode == 2, controller.printed
    assert "error: sweep.submitit: Slurm does not answer, and could not end its jobs: 1" in controller.printed
    slurm.start()
    sweep.finish(sweep.begin("sweep.resume=all"))
    assert sweep.state().attempts == 1


@pytest.mark.nightly
def test_stop_lets_the_jobs_save(tmp_path: Path, slurm: Slurm) -> None:
    """The job that waits in Slurm's queue is withdrawn."""
    sweep = OnSlurm(tmp_path, slurm, "seed=0,1", LONG, "sweep.submitit.slurm_nodelist=n1")
    controller = sweep.begin("sweep.submitit.cpus_per_task=4")
    sweep.wait_for_saves()
    done = sweep.project.python("-m", "hydraloop", "stop", "all")
    assert done.code == 0, done.text
    controller.wait(PATIENCE)
    assert sweep.state().preempted_by == "SIGTERM"
    assert sweep.state(1).attempts <= 1
    assert sweep.slurm_jobs() == []
    sweep.finish(sweep.begin("sweep.resume=all"))


@pytest.mark.nightly
def test_fifty_jobs(tmp_path: Path, slurm: Slurm) -> None:
    sweep = OnSlurm(tmp_path, slurm, "seed=range(50)", "engine.max_iters=12")
    done = sweep.run()
    assert done.code == 0, done.text
    assert sweep.states() == {"finished"}


@pytest.mark.nightly
def test_a_slurmd_dies(tmp_path: Path, slurm: Slurm) -> None:
    """Its job keeps running. Slurm starts a second copy on the other node after half a minute, which leaves."""
    sweep = OnSlurm(tmp_path, slurm, "seed=0", "engine.max_iters=15000")
    controller = sweep.begin()
    sweep.wait_for_saves()
    (job,) = sweep.slurm_jobs()
    slurm.kill_slurmd(slurm.run("squeue", "--noheader", "--format=%N").strip())
    until(lambda: " Restarts=1 " in slurm.run("scontrol", "show", "job", job), "no second copy", seconds=PATIENCE)
    sweep.finish(controller)
    assert sweep.processes() == 1


@pytest.mark.nightly
def test_a_node_dies(tmp_path: Path, slurm: Slurm) -> None:
    sweep = OnSlurm(tmp_path, slurm, "seed=0", LONG)
    controller = sweep.begin()
    sweep.wait_for_saves()
    (job,) = sweep.slurm_jobs()
    slurm.kill_node(slurm.run("squeue", "--noheader", "--format=%N").strip())
    sweep.finish(controller)
    assert " Restarts=1 " in slurm.run("scontrol", "show", "job", job)
    assert sweep.processes() == 2


@pytest.mark.slow
def test_a_single_run_is_submitted_and_stopped(tmp_path: Path, slurm: Slurm) -> None:
    project = make(tmp_path / "project")
    named = ("experiment=kills", "hooks=[]", "~hooks.ledger", "engine.max_iters=1000000")
    line = (*named, *ON_SLURM, "hydra.run.dir=outputs/mine")
    refused = project.train(*line)
    assert (refused.code, "Add detach=true" in refused.err) == (2, True), refused.text
    done = project.train(*line, "detach=true")
    assert done.out.startswith("outputs/mine is job "), done.text
    (job,) = slurm.run("squeue", "--noheader", "--format=%i").split()
    run = Run(project.path / "outputs" / "mine")
    until(lambda: (run.path / "checkpoints").exists(), "the run does not begin")
    slurm.run("scontrol", "requeue", job)
    until(lambda: (run.path / ".hydra" / "resume_1").exists(), "the run does not continue")
    shown = project.python("-m", "hydraloop", "status", "outputs/mine")
    assert shown.out.startswith("running: the run: process "), shown.text
    stopped = project.python("-m", "hydraloop", "stop", "outputs/mine")
    assert stopped.code == 0, stopped.text
    assert run.result["reason"] == "preempted by SIGTERM"
    assert slurm.run("squeue", "--noheader") == ""


def test_a_file_does_not_move_a_run_to_slurm(tmp_path: Path) -> None:
    project = Project.make(tmp_path / "project")
    project.write("conf/experiment/moved.yaml", "# @package _global_\nsweep: {executor: submitit}\n")
    done = project.train("experiment=[spirals,moved]", "engine.max_iters=1")
    assert done.code == 0, done.text
    assert project.run.result["status"] == "finished"
