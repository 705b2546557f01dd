"""Parent runs of sweeps at MLflow: created by the first job."""

from __future__ import annotations

import json
import multiprocessing
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydraloop.files.run_directory import SWEEP_FILE
from hydraloop.tracking.mlflow import MLflowTracker
from hydraloop.tracking.mlflow_runs import ensure_parent
from hydraloop.tracking.tracker import Ending, Finish, Run, Sweep
from tests.tracking.mlflow.runs import QUIET, attempt, client, empty_database, folder, found, opened

if TYPE_CHECKING:
    from mlflow.entities import Run as MLflowRun

__all__ = ["empty_database", "folder"]
pytestmark = QUIET


def sweep_in(folder: Path) -> Sweep:
    path = folder / "multirun" / "2026-11-21" / "20-55-06-7d7a9a"
    return Sweep(path, "sweep0", "2026-11-21/20-55-06-7d7a9a", 0, ("optimizer.lr",))


def begin(sweep: Sweep, number: int, **options: Any) -> MLflowTracker:
    """A job whose tracker has opened its run."""
    run_dir = sweep.folder / str(number)
    run_dir.mkdir(parents=True)
    params: dict[str, Any] = {"optimizer.lr": number / 10}
    name = f"lr={number / 10}"
    return opened(Run(run_dir, f"uid{number}", "digits", name, (attempt(**params),), sweep), **options)


def parent_of(tracker: MLflowTracker) -> MLflowRun:
    return client().get_run(found(tracker).data.tags["mlflow.parentRunId"])


def test_the_parent_only_groups_the_jobs(folder: Path) -> None:
    sweep = sweep_in(folder)
    jobs = [begin(sweep, number, tags={"team": "blue"}) for number in range(4)]
    endings: list[Ending] = ["finished", "failed", "interrupted", "killed"]
    for job, status in zip(jobs, endings, strict=True):
        result = {"status": status, "objective": {"metric": "a", "rule": "greater", "value": 0.5, "iteration": 5}}
        (job.run.run_dir / "result.json").write_text(json.dumps(result))
        job.finish(Finish(status))
    parents = [parent_of(job) for job in jobs]
    assert len({parent.info.run_id for parent in parents}) == 1
    parent = parents[0]
    assert (parent.info.run_name, parent.info.status) == (sweep.folder.name, "FINISHED")
    assert (parent.data.metrics, parent.data.tags["team"]) == ({}, "blue")
    assert [found(job).info.status for job in jobs] == ["FINISHED", "FAILED", "KILLED", "KILLED"]


def test_a_parent_that_was_deleted_is_created_again(folder: Path) -> None:
    sweep = sweep_in(folder)
    first = parent_of(begin(sweep, 0)).info.run_id
    client().delete_run(first)
    assert parent_of(begin(sweep, 1)).info.run_id != first


def test_two_senders_create_one_parent(folder: Path) -> None:
    """The senders are that of a killed controller and that of the next one."""
    sweep = sweep_in(folder)
    sweep.folder.mkdir(parents=True)
    (sweep.folder / SWEEP_FILE).touch()
    service = client()
    create = service.create_run

    def slowly(*given: Any, **named: Any) -> Any:
        time.sleep(0.5)
        return create(*given, **named)

    service.create_run = slowly  # type: ignore[method-assign]
    fork = multiprocessing.get_context("fork")
    senders = [fork.Process(target=ensure_parent, args=(service, sweep, "0", {})) for _ in range(2)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    assert len(client().search_runs(["0"])) == 1


def test_secrets_in_the_parent_s_tags_are_masked(folder: Path) -> None:
    tags = {"api_key": "abcdefgh12345678", "hydraloop.run": "mine", "note": "token=zzzzzzzzzz12345"}
    found = parent_of(begin(sweep_in(folder), 0, tags=tags)).data.tags
    assert {name: found[name] for name in tags} == {
        "api_key": "***", "hydraloop.run": "sweep0", "note": "token=***",
    }  # fmt: skip
