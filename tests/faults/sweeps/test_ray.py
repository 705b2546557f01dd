"""Sweeps on Ray, of which jobs, fork servers, actors, nodes and controllers are killed: nothing is lost or doubled."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from hydraloop.sweeps.sweep_directory import SweepDirectory
from tests.e2e.projects import Project, Run
from tests.e2e.trackers.tracked import mlflow_runs, points
from tests.faults.sweeps import ray_cluster
from tests.faults.sweeps.harness import ON_RAY, Kill, Sweep, make, train
from tests.faults.sweeps.judge import problems, problems_of_search
from tests.faults.sweeps.suite import LR
from tests.tracking.mlflow.runs import QUIET, empty_database

__all__ = ["empty_database"]  # a fixture
pytestmark = [
    QUIET,
    pytest.mark.nightly,
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install ray"),
]
KILLS = 20
MLFLOW = "hooks=[ema,mlflow]"
GRID = ("seed=0,1,2,3,4,5", "optimizer.lr=1e-2,3e-2", MLFLOW)
RANDOM = (LR, "sweep.trials=12", "sweep.sampler=random", MLFLOW)
ASHA = (LR, "sweep.trials=20", "sweep.promote=asha", "engine.val_interval=6", MLFLOW)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Project:
    made = make(tmp_path_factory.mktemp("project") / "project")
    shutil.copy(empty_database, made.path)
    return made


@pytest.fixture(scope="module")
def on_ray() -> Iterator[tuple[str, ...]]:
    """Options of a sweep on a cluster."""
    with ray_cluster.short_folder() as folder, ray_cluster.running(folder) as address:
        yield "sweep.executor=ray", f"sweep.ray.address='{address}'"


def killed(project: Project, name: str, overrides: tuple[str, ...]) -> Sweep:
    """Run a sweep with random kills."""
    draws = random.Random(name)
    sweep = train(project, name, overrides, draws, [Kill.draw(draws, ON_RAY) for _ in range(KILLS)])
    print(name, len(sweep.kills), "kills:", dict(Counter(kill.victim for kill in sweep.kills)))
    return sweep


def problems_of_mlflow(project: Project, sweep: Sweep) -> Iterator[str]:
    """Yield which jobs have no run in MLflow, or several, and which values are lost or doubled."""
    project.python("-m", "hydraloop", "sync", sweep.path.name)  # what a dead node had not sent yet
    directory = SweepDirectory.load(sweep.path)
    found = {one.uid: one for one in mlflow_runs(project.path)}
    runs = [Run(directory.run_dir(state)) for state in directory.states()]
    cursors = [json.loads((run.path / "tracking" / "mlflow.cursor.json").read_text()) for run in runs]
    mine = [found[cursor["memory"]["run_id"]] for cursor in cursors]
    parents = {one.parent for one in mine}
    if len(parents) != 1 or {one.uid for one in mine} != {uid for uid, one in found.items() if one.parent in parents}:
        yield f"{len(mine)} jobs have other runs"
    for number, (one, run) in enumerate(zip(mine, runs, strict=True)):
        if one.points != points(run):
            yield f"job {number}: {one.points}, not {points(run)}"


@pytest.mark.parametrize("axes", [GRID, RANDOM], ids=["grid", "random"])
def test_a_table_after_kills_is_that_of_the_pool(
    project: Project, on_ray: tuple[str, ...], axes: tuple[str, ...]
) -> None:
    name = "random" if axes is RANDOM else "grid"
    whole = train(project, f"{name}_pool", axes, random.Random(0), [])
    sweep = killed(project, f"{name}_ray", (*axes, *on_ray))
    assert list(problems(sweep, whole)) == []
    assert list(problems_of_mlflow(project, sweep)) == []


def test_each_decision_of_a_search_after_kills_is_made_again(project: Project, on_ray: tuple[str, ...]) -> None:
    sweep = killed(project, "asha_ray", (*ASHA, *on_ray))
    assert list(problems_of_search(sweep)) == []
    assert list(problems_of_mlflow(project, sweep)) == []
