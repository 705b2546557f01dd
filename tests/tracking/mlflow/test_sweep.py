"""Parent runs of sweeps at MLflow: created by the first job, with the results of the jobs that have ended."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow.entities import Run as MLflowRun

from hydraloop.commands import sync
from hydraloop.run_files.processes import started
from hydraloop.tracking import run_description
from hydraloop.tracking.cursor import Cursor
from hydraloop.tracking.mlflow.parent_run import pages, update_parents
from hydraloop.tracking.mlflow.tracker import MLflowTracker
from hydraloop.tracking.tracker import MLFLOW, Ending, Finish, GoneError, Run, Sweep
from tests.tracking.mlflow.runs import QUIET, attempt, client, empty_database, folder, found, opened

__all__ = ["empty_database", "folder"]
pytestmark = QUIET


def sweep_in(folder: Path, jobs: int | None = 3, axes: tuple[str, ...] = ("optimizer.lr",)) -> Sweep:
    sweep = Sweep((folder / "multirun" / "2026-11-21" / "20-55-06-7d7a9a").absolute(), "sweep0", "2026-11-21/a", 0)
    sweep = replace(sweep, name="2026-11-21/20-55-06-7d7a9a", jobs=jobs, axes=axes)
    run_description.write_sweep(sweep)
    return sweep


def begin(sweep: Sweep, number: int, **options: Any) -> MLflowTracker:
    """A job whose tracker has opened its run."""
    run_dir = sweep.folder / str(number)
    (run_dir / ".hydra").mkdir(parents=True)
    (run_dir / ".hydra" / "overrides.yaml").write_text(f"- optimizer.lr={number / 10}\n- seed=3\n")
    params: dict[str, Any] = {"optimizer.lr": number / 10}
    run = Run(run_dir, f"uid{number}", "digits", f"lr={number / 10}", (attempt(**params),))
    run_description.write(run)
    read = run_description.read(run_dir)
    assert read is not None
    return opened(read, **options)


def end(
    job: MLflowTracker,
    value: float | str | None = None,
    status: Ending = "finished",
    *,
    rule: str = "greater",
    **more: Any,
) -> None:
    """End a job; None: without a result."""
    if value is not None:
        result = {"status": status, "val_metrics": {"loss": 1.0, "accuracy": value}, "seconds": 61.5, "best": None}
        result["objective"] = {"metric": "accuracy", "rule": rule, "value": value, "iteration": 5}
        (job.run.run_dir / "result.json").write_text(json.dumps({**result, **more}))
    job.finish(Finish(status))


def parent_of(tracker: MLflowTracker) -> MLflowRun:
    return client().get_run(found(tracker).data.tags["mlflow.parentRunId"])


def table(parent: MLflowRun) -> str:
    """The description of a parent run."""
    return str(parent.data.tags["mlflow.note.content"]).replace("\u00a0", "")


def test_the_parent_has_the_value_of_the_best_job_and_a_table(folder: Path) -> None:
    sweep = sweep_in(folder)
    jobs = [begin(sweep, 0, tags={"team": "blue"})]
    parent = parent_of(jobs[0])
    assert (parent.info.run_name, parent.info.status, parent.data.tags["team"]) == (
        sweep.folder.name,
        "RUNNING",
        "blue",
    )
    end(jobs[0], 0.5)
    assert (parent_of(jobs[0]).info.status, parent_of(jobs[0]).data.metrics) == ("RUNNING", {"val/accuracy": 0.5})
    jobs += [begin(sweep, 1), begin(sweep, 2)]
    assert len({found(job).data.tags["mlflow.parentRunId"] for job in jobs}) == 1
    end(jobs[2], "nan")
    assert parent_of(jobs[0]).info.status == "RUNNING"
    for _ in range(2):  # a call may be repeated
        end(jobs[1], 0.9)
        parent = parent_of(jobs[0])
        assert (parent.info.status, parent.data.metrics) == ("FINISHED", {"val/accuracy": 0.9})
        assert table(parent) == (
            "| job | lr | val/accuracy | status | time |\n"
            "| --- | --- | --- | --- | --- |\n"
            "| 1 | 0.1 | 0.9 | finished | 0:01:02 |\n"
            "| 0 | 0.0 | 0.5 | finished | 0:01:02 |\n"
            "| 2 | 0.2 |  | finished | 0:01:02 |"
        )


def test_low_values_may_be_better_and_the_best_validation_counts(folder: Path) -> None:
    sweep = sweep_in(folder)
    jobs = [begin(sweep, number) for number in range(3)]
    for job, value in zip(jobs, [0.3, 0.2, 0.4], strict=True):
        best = {"metric": "accuracy", "value": 0.1, "iteration": 5, "checkpoint": "x.pth"} if value == 0.4 else None
        end(job, 0.1 if best else value, rule="less", best=best)
    assert parent_of(jobs[0]).data.metrics == {"val/accuracy": 0.1}
    assert [row.split(" | ")[:3] for row in table(parent_of(jobs[0])).splitlines()[2:]] == [
        ["| 2", "0.2", "0.1"],
        ["| 1", "0.1", "0.2"],
        ["| 0", "0.0", "0.3"],
    ]


def test_without_a_known_direction_there_is_no_best_job(folder: Path) -> None:
    sweep = sweep_in(folder, jobs=1)
    job = begin(sweep, 0)
    end(job, 0.3, objective={"metric": "accuracy", "rule": None, "value": 0.3, "iteration": 5})
    parent = parent_of(job)
    assert (parent.info.status, parent.data.metrics) == ("FINISHED", {})
    assert "val/" not in table(parent)
    assert pages(sweep.folder) == []


@pytest.mark.parametrize(
    ("endings", "ended", "status"),
    [
        (["finished", "killed", "finished"], None, "FAILED"),
        (["finished", "failed", "finished"], None, "FAILED"),
        (["finished", "failed"], None, "RUNNING"),
        (["finished", "interrupted"], "interrupted", "KILLED"),
        (["finished", "stopped"], "finished", "FINISHED"),
        (["finished"], "failed", "FAILED"),
        (["finished"], "interrupted", "KILLED"),
    ],
)
def test_how_a_sweep_ended(folder: Path, endings: list[Ending], ended: Any, status: str) -> None:
    sweep = sweep_in(folder)
    jobs = [begin(sweep, number) for number in range(len(endings))]
    for job, ending in zip(jobs, endings, strict=True):
        end(job, None if ending == "killed" else 0.5, ending)
    run_description.write_sweep(replace(sweep, ended=ended))
    update_parents(sweep.folder)
    update_parents(folder)  # no sweep
    assert parent_of(jobs[0]).info.status == status


def test_a_sweep_whose_controller_was_killed_is_closed(folder: Path) -> None:
    controller = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        identity = {"host": socket.gethostname(), "pid": controller.pid, "started": started(controller.pid)}
        sweep = replace(sweep_in(folder), **identity)
        run_description.write_sweep(sweep)
        job = begin(sweep, 0)
        end(job, 0.5)
        update_parents(sweep.folder)
        assert parent_of(job).info.status == "RUNNING"
    finally:
        controller.kill()
        controller.communicate()
    update_parents(sweep.folder)
    assert parent_of(job).info.status == "KILLED"


def moved_to(folder: Path, empty_database: Path) -> str:
    """Another address, with an empty database."""
    shutil.copy(empty_database, folder / "moved.db")
    return f"sqlite:///{folder}/moved.db"


@pytest.mark.slow
def test_a_sweep_that_was_moved_leaves_its_old_address(
    folder: Path, empty_database: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = sweep_in(folder)
    for number in range(3):
        job = begin(sweep, number)
        end(job, number / 10)
        options = {"system_metrics": False, "tracking_uri": None, "folder": str(folder)}
        Cursor(MLFLOW, options, memory=job.memory).save(job.run.run_dir, "mlflow")
    (folder / "mlflow.db").unlink()
    uri = moved_to(folder, empty_database)
    again = sync.How(again=True, options={"mlflow": {"tracking_uri": uri}})
    for how in (again, sync.How()):  # the address is kept
        assert sync.send_all([sweep.folder], how) == 0, capsys.readouterr().out
        experiment = client(uri).get_experiment_by_name("digits")
        assert experiment is not None
        parents = client(uri).search_runs([experiment.experiment_id], "tags.`hydraloop.run` = 'sweep0'")
        assert [(one.info.status, one.data.metrics) for one in parents] == [("FINISHED", {"val/accuracy": 0.2})]
        assert not (folder / "mlflow.db").exists()
        (line,) = pages(sweep.folder)
        assert uri in line


def test_a_parent_that_is_gone_does_not_keep_others_open(folder: Path, empty_database: Path) -> None:
    sweep = sweep_in(folder)
    uri = moved_to(folder, empty_database)
    gone, there = begin(sweep, 0, tracking_uri=uri), begin(sweep, 1)
    end(gone, 0.5)
    end(there, 0.5)
    (folder / "moved.db").unlink()
    run_description.write_sweep(replace(sweep, ended="finished"))
    with pytest.raises(GoneError, match=r"moved\.db"):
        update_parents(sweep.folder)
    assert parent_of(there).info.status == "FINISHED"
    assert not (folder / "moved.db").exists()


def test_jobs_without_this_tracker_count_as_ended(folder: Path) -> None:
    sweep = sweep_in(folder, jobs=2)
    (sweep.folder / "0").mkdir()
    (sweep.folder / "0" / "result.json").write_text("{}")
    job = begin(sweep, 1)
    end(job, 0.5)
    assert parent_of(job).info.status == "FINISHED"


def test_a_parent_that_was_deleted_is_created_again(folder: Path) -> None:
    sweep = sweep_in(folder)
    jobs = [begin(sweep, 0), begin(sweep, 1)]
    end(jobs[0], 0.5)
    first = parent_of(jobs[0]).info.run_id
    client().delete_run(first)
    end(jobs[1], 0.7)
    jobs.append(begin(sweep, 2))
    assert parent_of(jobs[2]).info.run_id != first
    end(jobs[2], 0.6)
    assert parent_of(jobs[2]).data.metrics == {"val/accuracy": 0.7}


def test_the_parent_s_name_and_tags(folder: Path) -> None:
    sweep = replace(sweep_in(folder), name="m")
    run_description.write_sweep(sweep)
    tags = {"api_key": "abcdefgh12345678", "hydraloop.run": "mine", "note": "token=zzzzzzzzzz12345"}
    run = parent_of(begin(sweep, 0, tags=tags))
    assert run.info.run_name == "m"
    assert {name: run.data.tags[name] for name in tags} == {
        "api_key": "***", "hydraloop.run": "sweep0", "note": "token=***",
    }  # fmt: skip


def test_the_table_of_many_jobs_ends_early(folder: Path) -> None:
    sweep = sweep_in(folder, jobs=None)
    job = begin(sweep, 0)
    path = sweep.folder / "tracking" / "mlflow.json"
    parents = json.loads(path.read_text())
    one = {"name": "a", "run_id": "b", "status": "failed", "metric": None, "rule": None, "value": None, "seconds": None}
    parents[0]["jobs"] = {str(number): {**one, "values": {"optimizer.lr": "a|b"}} for number in range(3000)}
    path.write_text(json.dumps(parents))
    end(job, 0.5)
    lines = table(parent_of(job)).splitlines()
    assert lines[2:4] == ["| 0 | 0.0 | 0.5 | finished | 0:01:02 |", "| 1 | a\\|b |  | failed |  |"]
    assert lines[-1] == "… and 2940 more"


def test_a_view_of_the_experiment_has_the_swept_values_and_the_metric(folder: Path) -> None:
    sweep = sweep_in(folder)
    job = begin(sweep, 0)
    end(job, 0.5)
    experiment = client().get_experiment_by_name("digits")
    assert experiment is not None
    (line,) = pages(sweep.folder)
    key = line.rpartition("viewStateShareKey=")[2]
    assert line == (
        f"mlflow: the jobs, best first: mlflow ui, http://localhost:5000/#/experiments/{experiment.experiment_id}/runs"
        "?workflowType=machine_learning&viewStateShareKey=val-accuracy-by-lr"
    )
    view = json.loads(experiment.tags[f"mlflow.sharedViewState.{key}"])
    assert view["name"] == "val/accuracy by lr"
    assert json.loads(view["state"]) == {
        "orderByKey": "metrics.`val/accuracy`",
        "orderByAsc": False,
        "selectedColumns": ["metrics.`val/accuracy`", "params.`optimizer.lr`"],
    }


@pytest.mark.slow
def test_no_torch_is_imported(folder: Path) -> None:
    code = (
        "import sys, hydraloop.tracking.mlflow.tracker, hydraloop.tracking.mlflow.parent_run, mlflow.tracking.client\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
