"""MLflowLoggerHook: a real run with its follower, over SQLite. What is sent, and when, is in tests/tracking."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hydraloop.commands.command_line import view as command
from hydraloop.engine.engine import Engine
from hydraloop.errors import UserError
from hydraloop.hooks import LoggerHook, MLflowLoggerHook
from hydraloop.tracking.cursor import Cursor
from tests.helpers import batches, make_engine
from tests.tracking.mlflow.runs import QUIET, client, empty_database, folder

__all__ = ["empty_database", "folder"]
pytestmark = QUIET


@pytest.mark.parametrize(
    ("options", "key", "remedy"),
    [
        ({"checkpoints": "lst"}, "checkpoints", "last"),
        ({"flush_timeout": -1.0}, "flush_timeout", "0 or more"),
    ],
)
def test_mistakes(options: dict[str, Any], key: str, remedy: str) -> None:
    with pytest.raises(UserError) as raised:
        MLflowLoggerHook(**options)
    assert raised.value.key == key
    assert remedy in str(raised.value)


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


def test_the_run_is_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    options: dict[str, Any] = {"tags": {"n": 1, "mlflow.runName": "first"}, "flush_timeout": 60.0}
    cursor, summary = run(folder / "run", **options)
    assert summary.startswith("4 of 4 records sent, mlflow ui, http://localhost:5000/#/experiments/")
    assert cursor.complete
    found = client().get_run(cursor.memory["run_id"])
    assert (found.info.run_name, found.info.status) == ("first", "FINISHED")
    assert client().get_experiment(found.info.experiment_id).name == "mine"
    assert found.data.tags["n"] == "1"
    history = client().get_metric_history(found.info.run_id, "perf/memory")
    assert [metric.step for metric in history] == [1, 2, 3]
    assert "val/loss" in found.data.metrics


@pytest.mark.slow  # some seconds, of a rare case
def test_sync_uses_the_server_of_the_run_and_not_of_the_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    cursor, summary = run(folder / "run", flush_timeout=10.0)  # the sender imports MLflow and tries once
    assert summary.startswith("0 of 4 records sent")
    assert "; python -m hydraloop sync" in summary
    assert not cursor.complete
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert command(["sync", str(folder / "run")]) == 1, "not sent to the database in this folder"
    assert "0 of 4 records there; not all: " in (said := capsys.readouterr().out)
    assert "127.0.0.1:9" in said
