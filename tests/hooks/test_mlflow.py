"""MLflowLoggerHook: a real run with its follower, over SQLite. What is sent, and when, is in tests/tracking."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hydraloop.engine.engine import Engine
from hydraloop.errors import UserError
from hydraloop.hooks import LoggerHook, MLflowLoggerHook
from hydraloop.tracking import sync
from hydraloop.tracking.cursor import Cursor
from tests.helpers import batches, make_engine
from tests.tracking.mlflow_runs import QUIET, client, empty_database, folder

__all__ = ["empty_database", "folder"]
pytestmark = QUIET


@pytest.mark.parametrize(
    ("options", "key", "remedy"),
    [
        ({"system_metrics_interval": 0.0}, "system_metrics_interval", "system_metrics=false"),
        ({"system_metrics_interval": float("nan")}, "system_metrics_interval", "Use seconds"),
        ({"checkpoints": "lst"}, "checkpoints", "last"),
        ({"flush_timeout": -1.0}, "flush_timeout", "0 or more"),
    ],
)
def test_mistakes(options: dict[str, Any], key: str, remedy: str) -> None:
    with pytest.raises(UserError) as raised:
        MLflowLoggerHook(**options)
    assert raised.value.key == key
    assert remedy in str(raised.value)


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
    assert summary == "4 of 4 records sent, mlflow ui"
    assert cursor.finished
    found = client().get_run(cursor.memory["run_id"])
    assert (found.info.run_name, found.info.status) == ("first", "FINISHED")
    assert client().get_experiment(found.info.experiment_id).name == "mine"
    assert found.data.tags["n"] == "1"
    history = client().get_metric_history(found.info.run_id, "train/memory")
    assert [metric.step for metric in history] == [1, 2, 3]
    assert "val/loss" in found.data.metrics


def test_a_server_that_is_not_there(folder: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    cursor, summary = run(folder / "run", flush_timeout=0.0)
    assert summary.startswith("0 of 4 records sent; python -m hydraloop.tracking.sync")
    assert not cursor.finished
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert sync.main([str(folder / "run")]) == 0
    cursor = Cursor.load(folder / "run", "mlflow") or cursor
    history = client().get_metric_history(cursor.memory["run_id"], "train/memory")
    assert [metric.step for metric in history] == [1, 2, 3]


def test_a_validation_on_its_own(folder: Path) -> None:
    made(folder / "run", flush_timeout=60.0).validate()
    cursor = Cursor.load(folder / "run", "mlflow")
    assert cursor is not None
    assert "val/loss" in client().get_run(cursor.memory["run_id"]).data.metrics


def test_an_address_that_is_none_ends_the_run_where_that_is_asked_for(folder: Path) -> None:
    engine = made(folder / "run", tracking_uri="foo://server", flush_timeout=60.0)
    engine.stages._policies["mlflow"].on_error = "raise"
    with pytest.raises(UserError, match="foo") as raised:
        engine.train()
    assert raised.value.key == "hooks.mlflow"
    assert engine.progress.iteration == 0
