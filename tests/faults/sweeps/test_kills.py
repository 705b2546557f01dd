"""Sweeps whose processes are killed end as one that was never interrupted, and a job ends once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.faults.sweeps import on_slurm, suite
from tests.faults.sweeps.harness import Kill, make, train
from tests.faults.sweeps.judge import problems

FEW = ("seed=0,1,2",)
WITHOUT_CLAIM = """
import filelock
import hydraloop.run_files.lock

hydraloop.run_files.lock._locked = filelock.FileLock  # not acquired
hydraloop.run_files.lock._is_held = lambda path: False
"""


@pytest.mark.slow
def test_kills_and_torn_files_lose_and_double_nothing(tmp_path: Path) -> None:
    kills = [
        Kill("job", "save", 1, 0.0),
        Kill("fork server", "iteration", 2, 0.0),
        Kill("controller", "iteration", 5, 0.01),
        Kill("follower", "iteration", 3, 0.0),
        Kill("everything", "done", 1, 0.0, "job.json"),
    ]
    project = make(tmp_path / "project")
    whole = train(project, "whole", FEW, random.Random(0), [])
    killed = train(project, "killed", FEW, random.Random(0), kills)
    assert len(killed.kills) >= 4
    assert list(problems(killed, whole)) == []


@pytest.mark.slow
def test_a_rank_that_is_killed_after_the_result_does_not_repeat_the_job(tmp_path: Path) -> None:
    project = make(tmp_path / "project")
    kills = [Kill("job", "done", 1, 0.0)]
    sweep = train(project, "ranks", ("seed=0", "distributed.nproc_per_node=2"), random.Random(1), kills)
    assert sweep.kills == kills
    assert list(problems(sweep, sweep)) == []


@pytest.mark.nightly
def test_jobs_that_run_twice_at_a_time_are_noticed(tmp_path: Path) -> None:
    project = make(tmp_path / "project", before=WITHOUT_CLAIM)
    axes = ("seed=0", "+hooks.ledger.together=true")
    unclaimed = train(project, "unclaimed", axes, random.Random(0), [], controllers=2)
    assert "doubled" in {kind for kind, _ in problems(unclaimed, unclaimed)}


@pytest.mark.nightly
def test_twenty_sweeps_with_random_kills() -> None:
    assert suite.main(sweeps=20, seed=1) == 0


@pytest.mark.nightly
def test_kills_of_jobs_nodes_and_controllers_on_slurm() -> None:
    assert on_slurm.main(count=20, seed=1) == 0
