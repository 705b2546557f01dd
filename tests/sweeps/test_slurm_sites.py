"""Sweeps on a Slurm as sites have it: with accounting, and with a partition that preempts another one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hydraloop.sweeps.executors.slurm_queue import jobs
from hydraloop.sweeps.sweep_directory import SweepDirectory
from tests.e2e.warm import Script
from tests.processes import until
from tests.slurm import Slurm, running
from tests.sweeps.test_slurm import LONG, PATIENCE, OnSlurm

PREEMPTION = (
    *("PreemptType=preempt/partition_prio", "PreemptMode=REQUEUE"),
    "PartitionName=urgent Nodes=ALL PriorityTier=2",
)


@pytest.fixture(scope="module")
def _slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with running(tmp_path_factory.mktemp("slurm"), lines=PREEMPTION, accounting=True) as cluster:
        yield cluster


def wait(sweep: OnSlurm, controller: Script) -> int:
    """Wait for the controller and all jobs. Return the exit code of the controller."""
    code = controller.wait(PATIENCE)
    until(lambda: jobs(sweep.path) == {}, controller.printed, seconds=PATIENCE)
    return code


def accounted(slurm: Slurm) -> list[str]:
    """Return the states of all jobs in the order of their submission, as sacct knows them."""
    listed = slurm.run("sacct", "--noheader", "--parsable2", "--allocations", "--format=State")
    return [line.split()[0] for line in listed.splitlines()]


def expected(sweep: OnSlurm) -> list[str]:
    """Return the same by our states."""
    names = {"interrupted": "CANCELLED", "failed": "FAILED", "finished": "COMPLETED"}
    return [names[state.state] for state in SweepDirectory.load(sweep.path).states()]


@pytest.mark.nightly
def test_sacct_agrees(tmp_path: Path, slurm: Slurm) -> None:
    """A job is cancelled, a job finishes, two fail. submitit, which asks sacct for each job, is not asked."""
    axes = ("seed=0", "optimizer.lr=1e-2,1e30", "engine.max_iters=1000000,24")
    sweep, earlier = OnSlurm(tmp_path, slurm, *axes), len(accounted(slurm))
    controller = sweep.begin()
    until((sweep.path / "sweep.json").exists, "the sweep does not begin")
    others_end = [False, True, True, True]
    until(lambda: [sweep.state(job).is_over for job in range(4)] == others_end, "no end", seconds=PATIENCE)
    sweep.wait_for_saves()
    until(lambda: len(slurm.run("squeue", "--noheader").splitlines()) == 1, "the other jobs do not leave the queue")
    slurm.run("scancel", "--me")
    assert wait(sweep, controller) == 1
    assert [sweep.state(job).state for job in range(4)] == ["interrupted", "finished", "failed", "failed"]
    assert [word for word in ("sacct", "arning") if word in controller.printed] == []
    wanted = expected(sweep)
    until(lambda: accounted(slurm)[earlier:] == wanted, f"{accounted(slurm)}, not {wanted}")


@pytest.mark.nightly
def test_a_preempted_job_continues_without_a_retry(tmp_path: Path, slurm: Slurm) -> None:
    sweep = OnSlurm(tmp_path, slurm, "seed=0", LONG, "sweep.max_retries=0")
    controller = sweep.begin()
    sweep.wait_for_saves()
    (job,) = slurm.run("squeue", "--noheader", "--format=%A").split()
    whole = ("--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null")
    slurm.run("sbatch", "--wait", *whole, "--wrap=sleep 1")
    assert wait(sweep, controller) == 0, controller.printed
    sweep.check()
    assert (sweep.processes(), sweep.state().attempts) == (2, 1)
    assert "resumed from" in (sweep.path / "0" / "job.log").read_text()
    assert " Restarts=1 " in slurm.run("scontrol", "show", "job", job)
