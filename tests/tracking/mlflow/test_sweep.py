"""Parent runs of sweeps at MLflow: one for all jobs, created by any of them, with their results at the end."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hydraloop.run.metric_rules import by_keys
from hydraloop.run.record_writer import RecordLog
from hydraloop.tracking import description
from hydraloop.tracking.follower.cursor import Cursor
from hydraloop.tracking.kinds import MLFLOW
from hydraloop.tracking.mlflow.sweep import ensure_parent, finish_parent
from hydraloop.tracking.mlflow.tracker import MLflowTracker
from hydraloop.tracking.tracker import Finish, Run, Sweep
from tests.tracking.mlflow.runs import QUIET, attempt, client, empty_database, folder, found, opened

__all__ = ["empty_database", "folder"]
pytestmark = QUIET


def sweep_in(folder: Path) -> Sweep:
    sweep = Sweep((folder / "multirun" / "a").absolute(), "sweep0", "2026-11-21/a", 0)
    description.write_sweep(sweep)
    return sweep


def job(
    folder: Path, number: int, values: Sequence[float | str] = (), *, metric: str = "accuracy", **params: Any
) -> MLflowTracker:
    """A job that has ended, with its files. The sweep gets the last of `values`."""
    run_dir = folder / "multirun" / "a" / str(number)
    (run_dir / "tracking").mkdir(parents=True)
    run = Run(run_dir, f"uid{number}", "digits", f"lr={number}", (attempt(**params),))
    description.write(run)
    read = description.read(run_dir)
    assert read is not None
    cursor = Cursor(MLFLOW, {"folder": str(folder)})
    tracker = opened(read, cursor.memory)
    log = RecordLog(run_dir / "metrics.jsonl")
    for iteration, value in enumerate(values):
        log.append({"mode": "val", "epoch": 1, "iteration": iteration, metric: float(value)})
    log.close()
    if values:
        result = {"status": "finished", "val_metrics": {metric: values[-1]}, "best": None}
        (run_dir / "result.json").write_text(json.dumps(result))
    tracker.finish(Finish("finished"))
    cursor.save(run_dir, "mlflow")
    return tracker


def parent_of(tracker: MLflowTracker) -> Any:
    return client().get_run(found(tracker).data.tags["mlflow.parentRunId"])


def test_one_parent_for_all_jobs(folder: Path) -> None:
    sweep = sweep_in(folder)
    parent = ensure_parent({"tags": {"team": "blue"}}, sweep, "digits")
    jobs = [job(folder, number, [0.1 * number]) for number in range(3)]
    assert {found(tracker).data.tags["mlflow.parentRunId"] for tracker in jobs} == {parent}
    assert [found(tracker).info.run_name for tracker in jobs] == ["lr=0", "lr=1", "lr=2"]
    assert [found(tracker).data.tags["job"] for tracker in jobs] == ["0", "1", "2"]
    run = client().get_run(parent)
    assert (run.info.run_name, run.info.status) == ("2026-11-21/a", "RUNNING")
    assert run.data.tags["team"] == "blue"
    assert ensure_parent({"experiment": "other"}, sweep, "digits") != parent
    (sweep.folder / "tracking" / "mlflow.json").unlink()  # a process that died before it could write it down
    assert ensure_parent({}, sweep, "digits") == parent


def test_the_parent_s_name_and_tags(folder: Path) -> None:
    sweep = replace(sweep_in(folder), name="m")
    tags = {"api_key": "abcdefgh12345678", "hydraloop.run": "mine", "note": "token=zzzzzzzzzz12345"}
    run = client().get_run(ensure_parent({"tags": tags}, sweep, "digits"))
    assert run.info.run_name == "m-sweep0"
    found = {name: run.data.tags[name] for name in tags}
    assert found == {"api_key": "***", "hydraloop.run": "sweep0", "note": "token=***"}


def test_the_parent_knows_how_its_jobs_ended(folder: Path) -> None:
    sweep_in(folder)
    jobs = [job(folder, number, [value]) for number, value in enumerate([0.5, 0.9, 0.7, "nan"])]
    for _ in range(2):
        finish_parent({}, folder / "multirun" / "a")
        run = parent_of(jobs[0])
        assert run.info.status == "FINISHED"
        history = client().get_metric_history(run.info.run_id, "accuracy")
        assert sorted((metric.step, metric.value) for metric in history[:3]) == [(0, 0.5), (1, 0.9), (2, 0.7)]
        assert len(history) == 4
        expected = {
            "jobs": "4",
            "jobs_failed": "0",
            "best_child": "lr=1",
            "best_child_run_id": jobs[1].memory["run_id"],
            "best_child_job": "1",
            "best_child_metric": "accuracy",
            "best_child_value": "0.9",
        }
        assert expected.items() <= run.data.tags.items()


def test_a_job_that_was_killed(folder: Path) -> None:
    sweep_in(folder)
    jobs = [job(folder, 0, [0.5]), job(folder, 1)]
    finish_parent({}, folder / "multirun" / "a")
    run = parent_of(jobs[1])
    assert (run.info.status, run.data.tags["jobs_failed"], run.data.tags["best_child_job"]) == ("FAILED", "1", "0")


def test_a_job_that_was_interrupted_has_not_failed(folder: Path) -> None:
    sweep_in(folder)
    jobs = [job(folder, 0, [0.5]), job(folder, 1)]
    (folder / "multirun" / "a" / "1" / "result.json").write_text(json.dumps({"status": "interrupted"}))
    finish_parent({}, folder / "multirun" / "a", jobs=2, interrupted=True)
    run = parent_of(jobs[1])
    assert (run.info.status, run.data.tags["jobs_failed"]) == ("KILLED", "0")


@pytest.mark.parametrize(
    ("told", "status"),
    [
        ({"jobs": 2}, "FINISHED"),
        ({"jobs": 3}, "FAILED"),
        ({"jobs": 3, "interrupted": True}, "KILLED"),
        ({"jobs": 2, "interrupted": True}, "KILLED"),
    ],
)
def test_a_sweep_that_was_cut_short(folder: Path, told: dict[str, Any], status: str) -> None:
    sweep_in(folder)
    jobs = [job(folder, number, [0.5]) for number in range(2)]
    finish_parent({}, folder / "multirun" / "a", **told)
    assert parent_of(jobs[0]).info.status == status


@pytest.mark.parametrize(
    ("metric", "params", "values", "best"),
    [
        ("loss", {}, [[3.0], [1.0], [2.0]], "1"),
        ("mae", {"default_hooks.checkpoint.rule": "less"}, [[3.0], [1.0], [2.0]], "1"),
        ("mae", {"default_hooks.checkpoint.rule": "greater"}, [[3.0], [1.0], [2.0]], "0"),
        ("mae", {"default_hooks.checkpoint.less_keys.0": "mae"}, [[3.0], [1.0], [2.0]], "1"),
        ("accuracy", {"default_hooks.checkpoint.less_keys.0": "accuracy"}, [[3.0], [1.0], [2.0]], "1"),
        ("mae", {}, [[3.0], [1.0], [2.0]], None),
    ],
)
def test_which_child_is_best(
    folder: Path, metric: str, params: dict[str, Any], values: list[list[float]], best: str | None
) -> None:
    sweep_in(folder)
    jobs = [job(folder, number, value, metric=metric, **params) for number, value in enumerate(values)]
    finish_parent({}, folder / "multirun" / "a")
    assert parent_of(jobs[0]).data.tags.get("best_child_job") == best


@pytest.mark.parametrize(("best", "job_number"), [(1.0, "0"), (3.0, "1")])
def test_a_best_value_shows_what_is_better(folder: Path, best: float, job_number: str) -> None:
    sweep_in(folder)
    jobs = [job(folder, 0, [2.0, 1.0, 3.0], metric="score"), job(folder, 1, [9.0], metric="score")]
    path = jobs[0].run.run_dir / "result.json"
    result = json.loads(path.read_text())
    result["best"] = {"metric": "score", "value": best, "iteration": 1, "checkpoint": "x.pth"}
    path.write_text(json.dumps(result))
    finish_parent({}, folder / "multirun" / "a")
    assert parent_of(jobs[0]).data.tags["best_child_job"] == job_number


def test_sweeps_that_are_elsewhere(folder: Path) -> None:
    sweep_in(folder)
    jobs = [job(folder, 0, [0.5])]
    finish_parent({"tracking_uri": "http://127.0.0.1:9"}, folder / "multirun" / "a")
    assert parent_of(jobs[0]).info.status == "RUNNING"
    finish_parent({}, folder)  # no sweep
    assert parent_of(jobs[0]).info.status == "RUNNING"


@pytest.mark.slow
def test_no_torch_is_imported(folder: Path) -> None:
    code = (
        "import sys, hydraloop.tracking.mlflow.tracker, hydraloop.tracking.mlflow.sweep, mlflow.tracking.client\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_metric_rules() -> None:
    assert by_keys("val_accuracy") is True
    assert by_keys("Loss") is False
    assert by_keys("mae") is None
    assert by_keys("acc", ["loss"], ["acc"]) is False
