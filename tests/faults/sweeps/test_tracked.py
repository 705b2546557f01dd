"""Sweeps with MLflow, on this machine and on Ray, whose processes are killed: nothing is lost or doubled."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.projects import Project
from tests.faults.sweeps import ray_cluster
from tests.faults.sweeps.harness import ON_RAY, PHASES, VICTIMS, Kill, Sweep, make, train
from tests.faults.sweeps.judge import problems, problems_in_mlflow, problems_of_search
from tests.faults.sweeps.suite import LR
from tests.tracking.mlflow.runs import QUIET, empty_database

__all__ = ["empty_database"]  # a fixture
pytestmark = [QUIET, pytest.mark.nightly]
KILLS = 20
MLFLOW = "hooks=[ema,mlflow]"
GRID = ("seed=0,1,2,3,4,5", "optimizer.lr=1e-2,3e-2", MLFLOW)
RANDOM = (LR, "sweep.trials=12", "sweep.sampler=random", MLFLOW)
ASHA = (LR, "sweep.trials=20", "sweep.promote=asha", "engine.val_interval=6", MLFLOW)


@dataclass(frozen=True)
class Engine:
    """Where the jobs of a sweep run."""

    name: str
    options: tuple[str, ...]
    victims: tuple[str, ...]
    """What is killed."""


@pytest.fixture(scope="module", params=["pool", "ray"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """This machine, and a cluster of Ray with two nodes."""
    if request.param == "pool":
        yield Engine("pool", (), VICTIMS)
        return
    pytest.importorskip("ray")
    with ray_cluster.short_folder() as folder, ray_cluster.running(folder) as address:
        yield Engine("ray", ("sweep.executor=ray", f"sweep.ray.address='{address}'"), ON_RAY)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Project:
    made = make(tmp_path_factory.mktemp("project") / "project")
    shutil.copy(empty_database, made.path)
    return made


def killed(project: Project, name: str, overrides: tuple[str, ...], engine: Engine) -> Sweep:
    """Run a sweep with random kills."""
    draws = random.Random(f"{name} {engine.name}")
    phases = PHASES[:-1] if overrides is ASHA else PHASES
    kills = [Kill.draw(draws, engine.victims, phases) for _ in range(KILLS)]
    sweep = train(project, f"{name}_{engine.name}", (*overrides, *engine.options), draws, kills)
    print(name, engine.name, len(sweep.kills), "kills:", dict(Counter(kill.victim for kill in sweep.kills)))
    return sweep


@pytest.mark.parametrize("axes", [GRID, RANDOM], ids=["grid", "random"])
def test_a_table_after_kills_is_that_of_a_whole_sweep(project: Project, engine: Engine, axes: tuple[str, ...]) -> None:
    name = "random" if axes is RANDOM else "grid"
    whole = train(project, f"{name}_whole_{engine.name}", axes, random.Random(0), [])
    sweep = killed(project, name, axes, engine)
    assert list(problems(sweep, whole)) == []
    assert list(problems_in_mlflow(sweep)) == []


def test_each_decision_of_a_search_after_kills_is_made_again(project: Project, engine: Engine) -> None:
    sweep = killed(project, "asha", ASHA, engine)
    assert list(problems_of_search(sweep)) == []
    assert list(problems_in_mlflow(sweep)) == []
