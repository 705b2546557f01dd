"""MLflowTracker with SQLite: MLflow's client finds each point once, also after errors."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hydraloop.files.metrics_log import Record
from hydraloop.files.metrics_writer import RecordLog
from hydraloop.files.result import Best, Result
from hydraloop.tracking.mlflow import MLflowTracker
from hydraloop.tracking.tracker import Finish, GoneError, RefusedError, UnusableError
from tests.tracking.mlflow.runs import (
    BEGAN,
    QUIET,
    artifacts,
    attempt,
    client,
    empty_database,
    folder,
    found,
    opened,
    points,
    run_in,
    send_files,
    text,
    training,
)
from tests.tracking.training import until

__all__ = ["empty_database", "folder"]
pytestmark = QUIET


def test_the_run_is_there(folder: Path) -> None:
    run = run_in(folder / "run", attempt(nothing=None, yes=True, **{"list.0": "x"}))
    tracker = opened(run, tags={"team": "blue", "mlflow.note.content": "What is **tried**."})
    tracker.send(training(0, 3))
    assert found(tracker).info.status == "RUNNING"
    Result("finished", best=Best("accuracy", 0.5, 20, "best.pth")).write(run.run_dir)
    tracker.finish(Finish("finished"))
    assert artifacts(tracker) == [], "the files come last"
    send_files(tracker)
    info, data = found(tracker).info, found(tracker).data
    assert (info.status, info.run_name, info.start_time) == ("FINISHED", "a/run", round(BEGAN * 1000))
    assert info.end_time == round((run.run_dir / "result.json").stat().st_mtime * 1000)
    assert client().get_experiment(info.experiment_id).name == "digits"
    assert data.params == {"a": "1", "yes": "true", "list.0": "x"}
    assert data.metrics == {"train/loss": 1 / 3, "train/lr": 0.1, "best/accuracy": 0.5}
    expected = {
        "mlflow.source.git.commit": "c0ffee",
        "mlflow.user": "me",
        "command": "python train.py a=1",
        "host": "here",
        "world_size": "1",
        "hydraloop.run": "uid0",
        "status": "finished",
        "team": "blue",
        "mlflow.note.content": "What is **tried**.",
    }
    assert expected.items() <= data.tags.items()
    assert artifacts(tracker) == ["config.yaml", "result.json"]
    assert text(tracker, "config.yaml") == "a: 1\n"
    assert info.artifact_uri.startswith(str(folder / "mlruns" / "digits"))
    page = f"#/experiments/{info.experiment_id}/runs/{info.run_id}?workflowType=machine_learning"
    assert tracker.where == f"run `mlflow ui` and open http://localhost:5000/{page}"


def test_parameters_are_those_that_distinguish_runs(folder: Path) -> None:
    config = {
        "optimizer._target_": "torch.optim.AdamW",
        "optimizer._partial_": True,
        "optimizer.lr": 0.1,
        "scheduler": "{}",
        "data.val": None,
        "hooks.ema._target_": "hydraloop.hooks.EMAHook",
        "hooks.ema.momentum": 0.5,
        "hooks.track._target_": "hydraloop.hooks.MLflowLoggerHook",
        "hooks.track.tags.team": "blue",
        "default_hooks.logger._target_": "hydraloop.hooks.LoggerHook",
        "default_hooks.logger.interval": 10,
    }
    tracker = opened(run_in(folder / "run", attempt(**config)))
    expected = {"a": "1", "optimizer": "AdamW", "optimizer.lr": "0.1", "hooks.ema.momentum": "0.5"}
    assert found(tracker).data.params == {**expected, "default_hooks.logger.interval": "10"}


def test_what_is_sent_again_is_there_once(folder: Path) -> None:
    tracker = opened(run_in(folder / "run"))
    values = {"loss": math.nan, "up": math.inf, "down": -math.inf, "fine": 0.1 + 0.2}
    records = training(0, 250, **values)
    tracker.send(records)
    tracker.send(records)
    tracker.send(training(240, 260, index=240, **values))
    for name in values:
        assert [step for step, _ in points(tracker, f"train/{name}")] == [10 * i for i in range(260)]
    assert {value for _, value in points(tracker, "train/fine")} == {0.1 + 0.2}
    assert all(math.isnan(value) for _, value in points(tracker, "train/loss"))
    assert {value for _, value in points(tracker, "train/up")} == {1.7976931348623157e308}


def test_names_that_mlflow_refuses(folder: Path) -> None:
    tracker = opened(run_in(folder / "run"))
    names = ["top@5", "top_5", "a//b", "../up", "x" * 300, "x" * 299 + "y", "naïve loss: [m]", "a/"]
    for index in range(2):
        tracker.send(training(index, index + 1, index=index, **{name: float(i) for i, name in enumerate(names)}))
    metrics = found(tracker).data.metrics
    assert sorted(metrics.values()) == [float(i) for i in range(len(names))]
    assert metrics["train/top_5"] == 1.0
    assert metrics["train/top_5_2f501b"] == 0.0
    assert all(len(points(tracker, key)) == 2 for key in metrics)


def test_many_and_long_parameters(folder: Path) -> None:
    params: dict[str, Any] = {f"p.{index}": index for index in range(250)}
    params |= {"long": "x" * 7000, "limit": "y" * 6000, "bad@key": 1, "bad_key": 2, "train/loss": "like a metric"}
    tracker = opened(run_in(folder / "run", attempt(**params)))
    tracker.send(training(0, 1))
    kept = found(tracker).data.params
    assert len(kept) == 256
    assert (len(kept["long"]), kept["long"][:3]) == (6000, "xxx")
    assert kept["limit"] == "y" * 6000
    assert (kept["bad_key"], kept["bad_key_9c1c77"]) == ("2", "1")
    assert kept["train/loss"] == "like a metric"


def test_a_process_that_died_before_it_knew_the_run(folder: Path) -> None:
    first = opened(run_in(folder / "run"))
    second = opened(first.run)
    assert second.memory["run_id"] == first.memory["run_id"]
    assert opened(run_in(folder / "run", uid="other")).memory["run_id"] != first.memory["run_id"]


def resumed(tracker: MLflowTracker, iteration: int, **params: Any) -> MLflowTracker:
    """A tracker for the next attempt of a run, before `open`."""
    number = tracker.run.attempt.number + 1
    run = replace(tracker.run, attempts=(*tracker.run.attempts, attempt(number, iteration, "a: 2\n", **params)))
    return MLflowTracker({"system_metrics": False}, run, json.loads(json.dumps(tracker.memory)))


def test_a_resumed_run_is_the_same_run(folder: Path) -> None:
    first = opened(run_in(folder / "run", attempt(b=1, c=1, e=3, f=3)))
    first.send(training(0, 3))
    first.finish(Finish("failed", "ValueError: no"))
    send_files(first)
    assert found(first).info.status == "FAILED"
    assert found(first).data.tags["error"] == "ValueError: no"
    second = resumed(first, 20, b=1, c=2, d=3, e=None)
    second.open()
    send_files(second)
    assert found(second).info.run_id == first.memory["run_id"]
    assert found(second).info.status == "RUNNING"
    before = {"a": "1", "b": "1", "c": "1", "e": "3", "f": "3"}
    changed = {"resume_1/c": "2", "resume_1/d": "3", "resume_1/e": "null", "resume_1/f": "null"}
    assert found(second).data.params == {**before, **changed}
    second.finish(Finish("finished"))
    assert found(second).info.status == "FINISHED"
    assert "error" not in found(second).data.tags
    assert artifacts(second) == ["config.yaml", "config_resume_1.yaml"]
    assert text(second, "config_resume_1.yaml") == "a: 2\n"


def test_points_of_iterations_done_twice(folder: Path) -> None:
    first = opened(run_in(folder / "run"))
    sent = training(0, 10)
    first.send(sent)
    first.finish(Finish("interrupted"))
    second = resumed(first, 50)
    assert second.rewound(6) == 6
    second.open()
    again = training(6, 12, index=6, later=60.0)
    again[1] = replace(again[1], values={"loss": 9.0, "lr": 0.1})
    second.send(again[:4])
    third = MLflowTracker({"system_metrics": False}, second.run, json.loads(json.dumps(second.memory)))
    third.open()  # another process: the previous one was killed, and did not note what it had sent
    third.send(again)
    logged(third.run.run_dir, [*sent[:6], *again])
    third.finish(Finish("finished"))
    assert points(third, "train/lr") == [(10 * i, 0.1) for i in range(12)]
    losses = [(10 * i, 1 / (i + 1)) for i in range(12)]
    assert points(third, "train/loss") == sorted([*losses, (70, 9.0)])
    latest = max(
        (m for m in client().get_metric_history(third.memory["run_id"], "train/loss") if m.step == 70),
        key=lambda metric: metric.timestamp,
    )
    assert latest.value == 9.0
    assert found(third).data.metrics["train/loss"] == 1 / 12
    assert "again_from" not in third.memory


def logged(run_dir: Path, records: list[Record]) -> None:
    """The log of a resumed run."""
    log = RecordLog(run_dir / "metrics.jsonl")
    for one in records:
        log.append({"mode": one.mode, "epoch": one.epoch, "iteration": one.iteration, **one.values})
    log.close()


def test_a_value_that_comes_back_at_its_step_is_the_latest_again(folder: Path) -> None:
    tracker = opened(run_in(folder / "run"))
    sent = training(0, 3, loss=1.0)
    tracker.send(sent)
    for number, value in enumerate([2.0, 1.0, 1.0], start=1):
        tracker.finish(Finish("interrupted"))
        tracker = resumed(tracker, 10)
        tracker.rewound(2)
        tracker.open()
        for _ in range(2):
            tracker.send(training(2, 3, index=2, later=60.0 * number, loss=value))
        assert found(tracker).data.metrics["train/loss"] == value
    assert points(tracker, "train/loss") == [(0, 1.0), (10, 1.0), (20, 1.0), (20, 1.0), (20, 2.0)]


def test_no_secret_of_the_options_is_sent(folder: Path) -> None:
    tags = {"api_key": "abcdefgh12345678", "note": "ab://me:zzzzz@host", "n": 1, "hydraloop.run": "mine"}
    options = {"tags": {**tags, "mlflow.runName": "password=hunter2hunter2"}}
    tracker = opened(run_in(folder / "run"), **options)
    run = found(tracker)
    assert {name: run.data.tags[name] for name in tags} == {
        "api_key": "***",
        "note": "ab://me:***@host",
        "n": "1",
        "hydraloop.run": "uid0",
    }
    assert "hunter2" not in str(run.info.run_name)


def test_points_that_a_killed_process_had_sent_and_not_noted(folder: Path) -> None:
    first = opened(run_in(folder / "run"))
    noted = json.loads(json.dumps(first.memory))
    first.send(training(0, 10))
    first.memory.clear()
    first.memory.update(noted)
    second = resumed(first, 40)
    second.open()
    second.send(training(0, 5))
    second.send(training(5, 12, index=5, later=60.0))
    assert points(second, "train/loss") == [(10 * i, 1 / (i + 1)) for i in range(12)]


@pytest.mark.parametrize(
    ("finish", "status"),
    [
        (Finish("stopped"), "FINISHED"),
        (Finish("interrupted"), "KILLED"),
        (Finish("killed"), "KILLED"),
        (Finish("failed", "x" * 9000), "FAILED"),
    ],
)
def test_how_it_ended(folder: Path, finish: Finish, status: str) -> None:
    tracker = opened(run_in(folder / "run"))
    tracker.finish(finish)
    tracker.finish(finish)
    assert found(tracker).info.status == status
    assert found(tracker).data.tags["status"] == finish.status


def test_a_deleted_experiment(folder: Path) -> None:
    tracker = opened(run_in(folder / "run"))
    client().delete_experiment(tracker.memory["experiment_id"])
    with pytest.raises(GoneError, match="does not have run"):
        tracker.send(training(0, 1))
    with pytest.raises(GoneError, match="does not have run"):
        opened(tracker.run, tracker.memory)
    with pytest.raises(UnusableError, match=r"must be in the 'active' state.*see .* experiment_name"):
        opened(run_in(folder / "other", uid="other"))
    assert opened(run_in(folder / "other", uid="other"), experiment="new").memory["run_id"]


def test_a_database_that_is_deleted_while_it_is_open(folder: Path) -> None:
    tracker = opened(run_in(folder / "run"))
    tracker.send(training(0, 1))
    (folder / "mlflow.db").unlink()
    with pytest.raises(GoneError, match="does not have run"):
        tracker.send(training(1, 2, index=1))
    with pytest.raises(GoneError, match="does not have run"):
        tracker.finish(Finish("finished"))


def test_what_the_server_refuses_is_refused(folder: Path) -> None:
    tracker = opened(run_in(folder / "run"))
    record = Record(0, "train", 1, 1, -1.0, {"loss": 1.0}, {})
    with pytest.raises(RefusedError):
        tracker.send([record])
    tracker.send(training(0, 1))
    assert len(points(tracker, "train/loss")) == 1


def test_another_address_than_before_gets_everything_if_the_cursor_is_deleted(
    folder: Path, empty_database: Path
) -> None:
    tracker = opened(run_in(folder / "run"))
    tracker.send(training(0, 2))
    (folder / "new").mkdir()
    shutil.copy(empty_database, folder / "new")
    with pytest.raises(GoneError, match=f"sqlite:///{folder}/new/mlflow.db does not have run"):
        opened(tracker.run, tracker.memory, tracking_uri="sqlite:///new/mlflow.db")
    moved = opened(tracker.run, {}, tracking_uri="sqlite:///new/mlflow.db")
    assert str(moved.where).startswith(
        f"run `mlflow ui --backend-store-uri sqlite:///{folder}/new/mlflow.db` and open http://"
    )


def test_a_password_is_not_stored_and_not_a_part_of_the_address(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    memory = {"tracking_uri": "http://127.0.0.1:8", "run_id": "1"}
    moved = MLflowTracker({"tracking_uri": "http://me:hunter2hunter2@127.0.0.1:9"}, run_in(folder / "run"), memory)
    with pytest.raises(ConnectionError):
        moved.open()
    memory |= {"tracking_uri": "http://127.0.0.1:9", "run_id": "1"}
    for uri in ("http://me:hunter2hunter2@127.0.0.1:9", "http://me:other2hunter2@127.0.0.1:9"):
        with pytest.raises(ConnectionError, match=r"^cannot reach http://127\.0\.0\.1:9: Connection refused$"):
            MLflowTracker({"tracking_uri": uri}, moved.run, memory).open()
    assert memory["run_id"] == "1"
    assert "hunter2" not in caplog.text + str(memory)


def test_system_metrics_are_those_of_mlflow_s_monitor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sync`, and the sender of a sweep, which may be on another machine, measure nothing."""
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.01")
    tracker = opened(run_in(folder / "run"), system_metrics=True)
    until(lambda: len(points(tracker, "system/cpu_utilization_percentage")) > 1)
    tracker.finish(Finish("finished"))
    steps = [step for step, _ in points(tracker, "system/cpu_utilization_percentage")]
    assert steps == [*range(len(steps))]
    without = opened(run_in(folder / "other", uid="other"), system_metrics=True, _measures=False)
    without.finish(Finish("finished"))
    assert not found(without).data.metrics
