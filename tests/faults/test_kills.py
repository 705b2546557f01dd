"""Runs that are killed at any moment end as a run that was never interrupted, to the last bit."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.e2e.projects import Project
from tests.faults.comparison import differences, ledger
from tests.faults.harness import KINDS, REFUSED, Kill, make, train


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """The project of the runs."""
    return make(tmp_path / "project")


@pytest.mark.slow
def test_kills_and_a_full_disk_change_nothing(project: Project) -> None:
    full = Kill("iteration", 0, 0.0, "disk")
    kills = [Kill("iteration", 9, 0.0), Kill("resume", 0, 0.0), full, Kill("save", 2, 0.002)]
    killed = train(project, "killed", "one process", kills)
    assert killed.kills == tuple(kills)
    assert REFUSED in killed.run.log
    whole = train(project, "whole", "one process", [])
    assert len(ledger(whole.run)) == 20
    assert differences(whole.run, killed.run) == []


@pytest.mark.nightly
def test_a_killed_worker_and_a_killed_rank_change_nothing(project: Project) -> None:
    kills = [
        Kill("iteration", 3, 0.0, "worker"),
        Kill("save", 1, 0.0, "rank 0"),
        Kill("iteration", 2, 0.0),
        Kill("iteration", 0, 0.0, "rank 1"),
    ]
    killed = train(project, "killed", "two ranks, workers", kills)
    assert killed.kills == tuple(kills)
    whole = train(project, "whole", "two ranks, workers", [])
    assert len(ledger(whole.run)) == 80
    assert differences(whole.run, killed.run) == []


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_random_kills_change_nothing(kind: str, project: Project) -> None:
    draws = random.Random(0)
    whole = train(project, "whole", kind, [])
    killed = train(project, "killed", kind, [Kill.draw(draws, kind) for _ in range(4)])
    assert differences(whole.run, killed.run) == []
