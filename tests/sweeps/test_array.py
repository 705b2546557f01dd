"""Sweeps that run as arrays of a real Slurm, whose nodes are different machines."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from hydraloop.commands.dispatch import run as main
from hydraloop.run_files import lock
from hydraloop.sweeps.slurm.submissions import arrays, counts
from hydraloop.sweeps.sweep_directory import SweepDirectory
from tests.e2e.projects import Project
from tests.processes import running_in, until
from tests.slurm import CPUS, Slurm, running

SHORT = ("experiment=spirals", "engine.max_iters=4", "engine.limit_val_batches=1", "engine.test=false")
LONG = ("experiment=spirals", "engine.max_epochs=100000", "engine.test=false")
ARRAY = ("sweep.executor=submitit", "sweep.submitit.timeout_min=10", "detach=true")


@pytest.fixture
def project(tmp_path: Path, slurm: Slurm) -> Project:
    return Project.make(tmp_path / "project")


def submitted(project: Project, *line: str) -> SweepDirectory:
    """Submit a sweep."""
    directory = [] if "sweep.resume=all" in line else ["hydra.sweep.dir=all"]
    done = project.train("-m", *ARRAY, *directory, *line)
    assert done.code == 0, done.text
    return SweepDirectory.load(project.path / "all")


def wait(sweep: SweepDirectory, seconds: float = 240.0) -> None:
    """Wait until Slurm has no task of a sweep."""
    until(lambda: not counts(sweep.path), f"tasks are left: {counts(sweep.path)}", seconds=seconds)


def saved(sweep: SweepDirectory, job: int) -> bool:
    """Wait until a job has saved."""
    until((sweep.folder(job) / "checkpoints" / "last_checkpoint").exists, f"job {job} has not saved")
    return True


def kill_asking(slurm: Slurm, sweep: SweepDirectory) -> None:
    """Kill the task that decides, while it has the lock of the search."""
    until(lambda: len(sweep.controllers()) == 2, "the tasks do not start")
    tasks = {(one.host, one.pid) for one in sweep.controllers().values()}
    assert {host for host, _ in tasks} == set(slurm.nodes)
    by_id = {(host, pid): one for host, pid in tasks for one in slurm.processes(host) if id_on_node(one) == pid}
    assert len(by_id) == 2
    for _ in range(1_000_000):
        held = lock.holder(sweep.path / ".search")
        if held is not None:
            process = by_id[held.host, held.pid]
            process.suspend()
            if lock.holder(sweep.path / ".search") == held:
                process.kill()
                return
            process.resume()
    raise AssertionError("the lock was never seen")


def id_on_node(process: psutil.Process) -> int | None:
    """Return the id that a process has in the namespace of its node."""
    with suppress(OSError):
        for line in Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("NSpid"):
                return int(line.split()[-1])
    return None


def is_running(sweep: SweepDirectory, job: int, *, attempt: int) -> bool:
    """Return whether an attempt of a job has begun."""
    state = sweep.state(job)
    return (state.state, state.attempts) == ("running", attempt)


@pytest.mark.slow
def test_no_process_stays_and_each_job_runs_once(project: Project, slurm: Slurm) -> None:
    """The commands work on a node, whose host name is another one. A secret is in no file."""
    sweep = submitted(project, *SHORT, "seed=0,1,2", "sweep.max_workers=2", "+api_key=hunter2")
    (array,) = arrays(sweep.path)
    on_nodes = [process for node in slurm.nodes for process in slurm.processes(node)]
    assert set(running_in(project.path)) <= set(on_nodes)
    hydraloop = (sys.executable, "-m", "hydraloop")
    status = project.python(*hydraloop[1:], "status", "all").out
    assert f"Slurm: array {array}; tasks: 3 PENDING" in status or "RUNNING" in status, status
    attached = slurm.run("srun", f"--chdir={project.path}", "--nodelist=n2", *hydraloop, "attach", "all")
    assert "all: 3 finished" in attached
    wait(sweep)
    states = sweep.states()
    assert [(state.state, state.attempts) for state in states] == [("finished", 1)] * 3
    assert {state.host for state in states} <= set(slurm.nodes)
    texts = [path.read_bytes() for path in sweep.path.rglob("*") if path.is_file()]
    assert not any(b"hunter2" in text for text in texts)


@pytest.mark.nightly
def test_a_task_continues_after_its_time_limit_and_ends_after_scancel(project: Project, slurm: Slurm) -> None:
    """The signal before the time limit is that of `scancel --signal`. Without it, `scancel` stops a job for good."""
    sweep = submitted(project, *LONG, "seed=0")
    assert saved(sweep, 0)
    task = f"{arrays(sweep.path)[0]}_0"
    slurm.run("scancel", "--signal=TERM", task)
    until(lambda: is_running(sweep, 0, attempt=2), "the job does not continue")
    slurm.run("scancel", task)
    wait(sweep)
    assert (sweep.state(0).state, sweep.state(0).attempts) == ("interrupted", 2)


@pytest.mark.nightly
def test_a_sweep_is_stopped_and_submitted_again(project: Project, slurm: Slurm) -> None:
    sweep = submitted(project, *LONG, "seed=0,1", "sweep.max_workers=1")
    assert saved(sweep, 0)
    assert main(["stop", str(sweep.path)]) == 0
    assert not counts(sweep.path)
    assert [state.state for state in sweep.states()] == ["interrupted", "queued"]
    sweep = submitted(project, *LONG, "seed=0,1,2", "sweep.resume=all")
    until(lambda: is_running(sweep, 0, attempt=2), "the job does not continue")
    assert len(arrays(sweep.path)) == 2
    assert sweep.count == 3


@pytest.mark.nightly
def test_another_task_decides_when_the_one_that_asks_is_killed(project: Project, slurm: Slurm) -> None:
    """The tasks are on different nodes, so the other one sees by the time of the lock that its holder has ended."""
    options = ("optimizer.lr=tag(log,interval(1e-4,1e-1))", "sweep.trials=12", "sweep.max_workers=2")
    sweep = submitted(project, *SHORT, *options, "engine.max_iters=40", f"+sweep.submitit.cpus_per_task={CPUS}")
    kill_asking(slurm, sweep)
    wait(sweep)
    states = sweep.states()
    assert [state.state for state in states] == ["finished"] * 12


@pytest.mark.nightly
def test_the_job_of_a_dead_node_continues_on_the_other_one(project: Project, slurm: Slurm) -> None:
    sweep = submitted(project, *LONG, "seed=0")  # the task of another job could get the slot first
    assert saved(sweep, 0)
    slurm.kill_node(sweep.state(0).host)  # Slurm sees it after half a minute, and the lock is free after a minute
    until(lambda: is_running(sweep, 0, attempt=2), "the job does not continue", seconds=240)
    until(lambda: "resumed from" in (sweep.folder(0) / "job.log").read_text(), "the job begins again")


@pytest.mark.nightly
def test_arrays_have_at_most_the_tasks_that_slurm_permits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second array starts when the first one has ended: not more than `max_workers` tasks run."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    with running(folder, ["n1"], ["MaxArraySize=3"]) as slurm:
        for name, value in slurm.environment.items():
            monkeypatch.setenv(name, value)
        sweep = submitted(Project.make(tmp_path / "project"), *SHORT, "seed=0,1,2,3", "sweep.max_workers=1")
        _, second = arrays(sweep.path)
        listed = slurm.run("squeue", "--noheader", "--array", "--format=%i %E").splitlines()
        assert [line.split()[0] for line in listed if line.startswith(second)] == [f"{second}_0"]
        wait(sweep)
    assert [state.state for state in sweep.states()] == ["finished"] * 4
