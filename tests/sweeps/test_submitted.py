"""Commands that are jobs of a real Slurm, whose nodes are different machines: the controllers of sweeps."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from hydraloop.commands.command_line import view as main
from hydraloop.sweeps.executors import slurm_queue
from hydraloop.sweeps.executors.slurm_queue import MAIN, current_states, jobs
from hydraloop.sweeps.sweep_directory import SweepDirectory
from tests.e2e.projects import Project
from tests.processes import running_in, until
from tests.slurm import Slurm

SHORT = ("experiment=spirals", "engine.max_iters=4", "engine.limit_val_batches=1", "engine.test=false")
LONG = ("experiment=spirals", "engine.max_epochs=100000", "engine.test=false")
SUBMITTED = ("sweep.executor=submitit", "sweep.submitit.timeout_min=10", "detach=true")


@pytest.fixture
def project(tmp_path: Path, slurm: Slurm) -> Project:
    return Project.make(tmp_path / "project")


def submitted(project: Project, *line: str) -> SweepDirectory:
    """Submit a sweep."""
    directory = [] if "sweep.resume=all" in line else ["hydra.sweep.dir=all"]
    done = project.train("-m", *SUBMITTED, *directory, *line)
    assert done.code == 0, done.text
    return SweepDirectory.load(project.path / "all")


def wait(sweep: SweepDirectory) -> None:
    """Wait until Slurm has no job of a sweep."""
    until(lambda: jobs(sweep.path) == {}, f"jobs are left: {jobs(sweep.path)}", seconds=240)


def wait_for_saves(sweep: SweepDirectory, *numbers: int) -> None:
    """Wait until jobs have saved."""
    for number in numbers:
        saved = sweep.folder(number) / "checkpoints" / "last_checkpoint"
        until(saved.exists, f"job {number} has not saved", seconds=240)


def controller(sweep: SweepDirectory) -> str:
    """Return the id of the controller's job."""
    return (jobs(sweep.path) or {})[MAIN].id


@pytest.mark.slow
def test_no_process_stays_and_each_job_runs_once(project: Project, slurm: Slurm) -> None:
    """The commands work on a node, whose host name is another one. A secret is in no file."""
    sweep = submitted(project, *SHORT, "seed=0,1,2", "sweep.max_workers=2", "+my.api_key=hunter2")
    on_nodes = [process for node in slurm.nodes for process in slurm.processes(node)]
    assert set(running_in(project.path)) <= set(on_nodes)
    hydraloop = (sys.executable, "-m", "hydraloop")
    status = project.python(*hydraloop[1:], "status", "all").out
    assert "Slurm: your jobs in the queue: " in status, status
    again = project.train("-m", *SUBMITTED, *SHORT, "seed=0,1,2", "+my.api_key=hunter2", "sweep.resume=all")
    assert (again.code, "of Slurm runs this command already" in again.err) == (2, True), again.text
    until(lambda: sweep.holder() is not None, "no controller begins", seconds=240)
    attached = slurm.run("srun", f"--chdir={project.path}", "--nodelist=n2", *hydraloop, "attach", "all")
    assert "all: 3 finished" in attached
    wait(sweep)
    states = sweep.states()
    assert [(state.state, state.attempts) for state in states] == [("finished", 1)] * 3
    assert any("3 finished" in path.read_text() for path in sweep.path.glob("*.log"))
    texts = [path.read_bytes() for path in sweep.path.rglob("*") if path.is_file()]
    assert not any(b"hunter2" in text for text in texts)


@pytest.mark.slow
def test_at_its_time_limit_a_controller_leaves_its_jobs_and_starts_again(project: Project, slurm: Slurm) -> None:
    """The signal before the time limit is that of `scancel --signal`. `stop` ends the controller and its jobs."""
    sweep = submitted(project, *LONG, "seed=0,1", "sweep.max_workers=1")
    wait_for_saves(sweep, 0)
    job = controller(sweep)
    slurm.run("scancel", "--signal=TERM", job)
    until(lambda: " Restarts=1 " in slurm.run("scontrol", "show", "job", job), "it does not start again")
    until(lambda: sweep.holder() is not None, "no controller begins")
    assert (sweep.state(0).state, sweep.state(0).attempts) == ("running", 1)
    assert main(["stop", str(sweep.path)]) == 0
    assert jobs(sweep.path) == {}
    assert [(state.state, state.preempted_by) for state in current_states(sweep)] == [
        ("interrupted", "SIGTERM"),
        ("queued", None),
    ]


@pytest.mark.nightly
def test_the_controller_of_a_dead_node_continues_on_the_other_one(project: Project, slurm: Slurm) -> None:
    """The job may run on its node only. It continues when the node is there again."""
    sweep = submitted(project, *LONG, "seed=0", "sweep.submitit.slurm_nodelist=n1")
    wait_for_saves(sweep, 0)
    before = sweep.holder()
    assert before is not None
    slurm.kill_node(before.host)
    until(lambda: (now := sweep.holder()) is not None and now.host != before.host, "no", seconds=240)
    slurm.start()
    until((sweep.folder(0) / ".hydra" / "resume_1").exists, "the job does not continue", seconds=240)
    assert (sweep.state(0).state, sweep.state(0).attempts) == ("running", 1)
    assert main(["stop", str(sweep.path)]) == 0


def test_no_answer_of_slurm_does_not_mean_that_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`squeue` fails, or is not there."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / slurm_queue.FOLDER).mkdir()
    (tmp_path / "run" / ".hydra").mkdir()
    (tmp_path / "run" / ".hydra" / "config.yaml").write_text("{}")
    monkeypatch.setattr(slurm_queue, "_ENDING", 0.0)
    monkeypatch.setenv("PATH", str(tmp_path))
    for answers in (False, True):
        if answers:
            (tmp_path / "squeue").write_text("#!/bin/sh\nexit 1\n")
            (tmp_path / "squeue").chmod(stat.S_IRWXU)
        assert main(["stop", str(tmp_path / "run")]) == 1
        assert "error: Slurm does not answer" in capsys.readouterr().err
        assert main(["status", str(tmp_path / "run")]) == 0
        assert "Slurm does not answer" in capsys.readouterr().out
