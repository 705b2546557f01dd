"""MLflowLoggerHook: a real run with its follower, over SQLite. What is sent, and when, is in tests/tracking."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlflow
import pytest

from hydraloop.commands.dispatch import run as command
from hydraloop.engine.engine import Engine
from hydraloop.errors import UserError
from hydraloop.hooks import CheckpointHook, LoggerHook, MLflowLoggerHook
from hydraloop.tracking.cursor import Cursor
from tests.e2e.projects import REPOSITORY
from tests.helpers import at, batches, make_engine
from tests.marks import slow
from tests.tracking.mlflow.runs import QUIET, client, empty_database, folder, set_up
from tests.tracking.mlflow.server import silent_server

__all__ = ["empty_database", "folder"]
pytestmark = QUIET


@pytest.mark.parametrize(
    ("options", "key", "remedy"),
    [
        ({"system_metrics_interval": 0.0}, "system_metrics_interval", "above 0"),
        ({"system_metrics_interval": float("nan")}, "system_metrics_interval", "above 0"),
        ({"checkpoints": "lst"}, "checkpoints", "last"),
        ({"flush_timeout": -1.0}, "flush_timeout", "0 or more"),
        ({"registered_model_name": "digits"}, "registered_model_name", "log_model=true"),
        ({"registered_model_name": "a/b", "log_model": True}, "registered_model_name", "neither / nor :"),
        ({"registered_model_name": "a:1", "log_model": True}, "registered_model_name", "neither / nor :"),
        ({"registered_model_name": " ", "log_model": True}, "registered_model_name", "at least one letter"),
    ],
)
def test_mistakes(options: dict[str, Any], key: str, remedy: str) -> None:
    with pytest.raises(UserError) as raised:
        MLflowLoggerHook(**options)
    assert raised.value.key == key
    assert remedy in str(raised.value)


def test_the_experiment_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "theirs")
    assert MLflowLoggerHook()._options["experiment"] == "theirs"
    assert MLflowLoggerHook(experiment="mine")._options["experiment"] == "mine"


def test_a_second_one_is_refused(tmp_path: Path) -> None:
    """In a sweep, each would take the other's jobs for its own."""
    engine = make_engine(tmp_path, {"mlflow": MLflowLoggerHook(), "other": MLflowLoggerHook()}, train=batches(1))
    with pytest.raises(UserError, match="mlflow and other would use the same run id"):
        engine.train()


def made(run_dir: Path, **options: Any) -> Engine:
    """An engine with the hook."""
    run_dir.mkdir()
    hooks = {"logger": LoggerHook(interval=1), "mlflow": MLflowLoggerHook(**options)}
    return make_engine(run_dir, hooks, train=batches(3), val=batches(1))


def run(run_dir: Path, **options: Any) -> tuple[Cursor, str]:
    """Train with the hook. Returns its cursor and its line in the summary."""
    engine = made(run_dir, **options)
    engine.train()
    cursor = Cursor.load(run_dir, "mlflow")
    assert cursor is not None
    return cursor, engine.messages.read("tracked")["mlflow"]


def test_the_run_is_there(folder: Path) -> None:
    options = {"experiment": "mine", "run_name": "first", "tags": {"n": 1}, "flush_timeout": 60.0}
    cursor, summary = run(folder / "run", **options)
    assert summary.startswith("4 of 4 records sent, mlflow ui, http://localhost:5000/#/experiments/")
    assert cursor.finished
    found = client().get_run(cursor.memory["run_id"])
    assert (found.info.run_name, found.info.status) == ("first", "FINISHED")
    assert client().get_experiment(found.info.experiment_id).name == "mine"
    assert found.data.tags["n"] == "1"
    history = client().get_metric_history(found.info.run_id, "perf/memory")
    assert [metric.step for metric in history] == [1, 2, 3]
    assert "val/loss" in found.data.metrics


@pytest.mark.slow  # some seconds, of an export
def test_the_best_model_is_exported_with_the_first_batch_as_the_example(folder: Path) -> None:
    hook = MLflowLoggerHook(log_model=True, flush_timeout=0.0)
    (folder / "run").mkdir()
    data = batches(3)
    make_engine(
        folder / "run", {"logger": LoggerHook(), "checkpoint": CheckpointHook(), "mlflow": hook}, train=data
    ).train()
    description = json.loads((folder / "run" / "export" / "model.json").read_text(encoding="utf-8"))
    assert description["example"] == data[0][0][:2].tolist()
    assert (folder / "run" / "export" / "model.pt2").exists()


@pytest.mark.slow  # some seconds, of a rare case
def test_sync_uses_the_server_of_the_run_and_not_of_the_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    cursor, summary = run(folder / "run", flush_timeout=0.0)
    assert summary.startswith("0 of 4 records sent")
    assert "; python -m hydraloop sync" in summary
    assert not cursor.finished
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert command(["sync", str(folder / "run")]) == 1, "not sent to the database in this folder"
    assert "0 of 4 records there; not all: " in (said := capsys.readouterr().out)
    assert "127.0.0.1:9" in said


@pytest.mark.slow
def test_a_validation_without_training(folder: Path) -> None:
    made(folder / "run", flush_timeout=60.0).validate()
    cursor = Cursor.load(folder / "run", "mlflow")
    assert cursor is not None
    assert "val/loss" in client().get_run(cursor.memory["run_id"]).data.metrics


@pytest.mark.slow  # some seconds; a tracker's error before the first iteration is in tests/tracking/test_hook.py
def test_an_invalid_address_ends_the_run_with_on_error_raise(folder: Path) -> None:
    engine = made(folder / "run", tracking_uri="foo://server", flush_timeout=60.0)
    engine.calls._policies["mlflow"].on_error = "raise"
    with pytest.raises(UserError, match="foo") as raised:
        engine.train()
    assert raised.value.key == "hooks.mlflow"
    assert engine.progress.iteration == 0


# Code in the training process that uses MLflow itself. ----------------------------------------------------------------


def trained_with(folder: Path, call: Callable[[MLflowLoggerHook], None], **options: Any) -> tuple[Cursor, list[str]]:
    """Train with a hook that calls `call` after each iteration. Returns the cursor and the ids of all runs."""
    (folder / "run").mkdir()
    hook = MLflowLoggerHook(system_metrics=False, flush_timeout=60.0, **options)
    after = at("after_train_iter", lambda engine: call(hook), nth=0)
    make_engine(
        folder / "run", {"logger": LoggerHook(interval=1), "mlflow": hook, "user": after}, train=batches(3)
    ).train()
    cursor = Cursor.load(folder / "run", "mlflow")
    assert cursor is not None
    ids = [one.experiment_id for one in client().search_experiments()]
    return cursor, [one.info.run_id for one in client().search_runs(ids)]


def test_user_code_logs_to_the_same_run(folder: Path) -> None:
    seen: list[tuple[str | None, str]] = []

    def log(hook: MLflowLoggerHook) -> None:
        seen.append((hook.run_id, os.environ["MLFLOW_TRACKING_URI"]))
        mlflow.log_metric("mine", len(seen), step=len(seen))
        if len(seen) == 2:
            mlflow.end_run()  # as autolog does; MLflow has removed MLFLOW_RUN_ID

    before = dict(os.environ)
    cursor, runs = trained_with(folder, log)
    assert seen == 3 * [(cursor.memory["run_id"], f"sqlite:///{folder}/mlflow.db")]
    assert runs == [cursor.memory["run_id"]]
    assert dict(os.environ) == before
    assert mlflow.active_run() is None
    run = client().get_run(runs[0])
    assert run.info.status == "FINISHED"
    assert {"mine", "perf/memory"} <= run.data.metrics.keys()
    assert len(client().get_metric_history(runs[0], "mine")) == 3


@pytest.mark.parametrize("status", ["FINISHED", slow("FAILED")])
def test_user_code_logs_to_the_address_of_the_run(
    status: str, tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is sent to MLflow's default database, `mlflow.db` in the working directory."""
    set_up(monkeypatch)
    monkeypatch.chdir(tmp_path)
    shutil.copy(empty_database, tmp_path / "elsewhere.db")
    (tmp_path / "run").mkdir()
    hook = MLflowLoggerHook(tracking_uri="sqlite:///elsewhere.db", system_metrics=False, flush_timeout=60.0)

    def log(engine: Engine) -> None:
        assert hook.run_id is not None
        mlflow.log_metric("mine", 1.0, step=engine.progress.iteration)
        if status == "FAILED" and engine.progress.iteration == 3:
            raise RuntimeError("on purpose")

    hooks = {"logger": LoggerHook(interval=1), "mlflow": hook, "user": at("after_train_iter", log, nth=0)}
    with pytest.raises(RuntimeError, match="on purpose") if status == "FAILED" else nullcontext():
        make_engine(tmp_path / "run", hooks, train=batches(3)).train()
    assert mlflow.active_run() is None, "ended, before the environment is restored"
    there = client(f"sqlite:///{tmp_path}/elsewhere.db")
    (found,) = there.search_runs([one.experiment_id for one in there.search_experiments()])
    assert found.info.status == status
    assert len(there.get_metric_history(found.info.run_id, "mine")) == 3
    assert sorted(path.name for path in tmp_path.glob("*.db")) == ["elsewhere.db"]


_AUTOLOG = """
from pathlib import Path
import mlflow
from sklearn.linear_model import LogisticRegression
from tests.hooks.test_mlflow import trained_with

def fit(hook):
    assert hook.run_id is not None
    LogisticRegression().fit([[0.0], [1.0]], [0, 1])

mlflow.sklearn.autolog(log_models=False, silent=True)
trained_with(Path.cwd(), fit)
"""


@pytest.mark.nightly
def test_autolog_in_user_code_logs_to_the_same_run(folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", _AUTOLOG], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    experiment = client().get_experiment_by_name("hydraloop")
    (run,) = client().search_runs([one.experiment_id for one in client().search_experiments()])
    assert run.info.experiment_id == experiment.experiment_id
    assert run.info.status == "FINISHED"
    assert {"training_accuracy_score", "perf/memory"} <= run.data.metrics.keys()


@pytest.mark.slow
def test_without_the_service_there_is_no_run_id(folder: Path) -> None:
    (folder / "run").mkdir()
    hook = MLflowLoggerHook(tracking_uri="http://127.0.0.1:9", flush_timeout=0.0)
    assert hook.run_id is None
    ids: list[str | None] = []
    after = at("after_train_iter", lambda engine: ids.append(hook.run_id), nth=0)
    make_engine(folder / "run", {"logger": LoggerHook(interval=1), "mlflow": hook, "user": after}).train()
    assert set(ids) == {None}
    assert "MLFLOW_RUN_ID" not in os.environ


@pytest.mark.slow  # some seconds, of a rare case
def test_a_service_that_does_not_answer_is_awaited_once(folder: Path) -> None:
    (folder / "run").mkdir()
    waited: list[float] = []

    def read(engine: Engine) -> None:
        begun = time.monotonic()
        assert hook.run_id is None
        waited.append(time.monotonic() - begun)

    with silent_server() as uri:
        hook = MLflowLoggerHook(tracking_uri=uri, flush_timeout=1.0)
        hooks = {"logger": LoggerHook(interval=1), "mlflow": hook, "user": at("after_train_iter", read, nth=0)}
        make_engine(folder / "run", hooks, train=batches(3)).train()
    assert waited[0] >= 0.9
    assert max(waited[1:]) < 0.5
