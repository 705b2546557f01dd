"""Hooks of trackers: refused options, and a real run with its sender. What is sent is in tests/tracking."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hydraloop.commands.command_line import view as command
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.errors import UserError
from hydraloop.hooks import LoggerHook, MLflowLoggerHook, TensorBoardLoggerHook, WandbLoggerHook
from hydraloop.tracking.cursor import Cursor
from tests.helpers import batches, make_engine
from tests.tracking.mlflow.runs import QUIET, client, empty_database, folder

__all__ = ["empty_database", "folder"]
pytestmark = QUIET


@pytest.mark.parametrize(
    ("hook", "options", "remedy"),
    [
        (MLflowLoggerHook, {"checkpoints": "lst"}, "last"),
        (MLflowLoggerHook, {"flush_timeout": -1.0}, "0 or more"),
        (WandbLoggerHook, {"checkpoints": "some"}, "best"),
        (WandbLoggerHook, {"flush_timeout": -1.0}, "0 or more"),
        (TensorBoardLoggerHook, {"histograms": 0}, ""),
        (TensorBoardLoggerHook, {"flush_timeout": -1.0}, "0 or more"),
        (TensorBoardLoggerHook, {"interval": 0}, ""),
    ],
)
def test_a_mistake_names_its_option(hook: type[Hook], options: dict[str, Any], remedy: str) -> None:
    with pytest.raises(UserError) as raised:
        hook(**options)
    assert [raised.value.key] == list(options)
    assert raised.value.remedy
    assert remedy in str(raised.value)


@pytest.mark.parametrize(
    ("hook", "why"),
    [
        (MLflowLoggerHook, "one and other would use the same run id"),
        (WandbLoggerHook, "one and other"),
        (TensorBoardLoggerHook, "one and other would write the same files"),
    ],
)
def test_a_second_one_of_the_same_tracker_is_refused(tmp_path: Path, hook: type[Hook], why: str) -> None:
    """The services would mix what both send."""
    engine = make_engine(tmp_path, {"logger": LoggerHook(), "one": hook(), "other": hook()}, train=batches(1))
    with pytest.raises(UserError, match=why):
        engine.hooks["other"].before_run(engine)


def trained(run_dir: Path, name: str, hook: Hook) -> tuple[Cursor, Engine]:
    """A run of three iterations and a validation, with a tracker: four records."""
    run_dir.mkdir(exist_ok=True)
    engine = make_engine(run_dir, {"logger": LoggerHook(interval=1), name: hook}, train=batches(3), val=batches(1))
    engine.train()
    cursor = Cursor.load(run_dir, name)
    assert cursor is not None
    return cursor, engine


def test_mlflow_has_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    hook = MLflowLoggerHook(tags={"n": 1, "mlflow.runName": "first"}, flush_timeout=60.0)
    cursor, engine = trained(folder / "run", "mlflow", hook)
    summary = engine.messages.read("tracked")["mlflow"]
    assert summary.startswith("4 of 4 records sent, run `mlflow ui` and open http://localhost:5000/#/experiments/")
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
    cursor, engine = trained(folder / "run", "mlflow", MLflowLoggerHook(flush_timeout=10.0))  # it tries once
    summary = engine.messages.read("tracked")["mlflow"]
    assert summary.startswith("0 of 4 records sent")
    assert "; hydraloop sync" in summary
    assert not cursor.complete
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert command(["sync", str(folder / "run")]) == 1, "not sent to the database in this folder"
    assert "0 of 4 records there; not all: " in (said := capsys.readouterr().out)
    assert "127.0.0.1:9" in said


def test_wandb_has_the_run_without_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the machine's API key. The option replaces the variable; secrets in names are masked."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "disabled")
    init = {"mode": "offline", "notes": "password=hunter2hunter2", "group": "token=zzzzzzzzzz"}
    cursor, _ = trained(tmp_path, "wandb", WandbLoggerHook(init=init, flush_timeout=60.0))
    assert (cursor.sent, cursor.complete) == (4, True)
    assert str(cursor.where).startswith(f"wandb sync {tmp_path}/wandb/offline-run-")
    files = [*(tmp_path / "wandb").rglob("*"), *(tmp_path / "tracking").rglob("*")]  # `code.patch` has this test
    written = b"".join(path.read_bytes() for path in files if path.is_file())
    assert b"password=***" in written
    assert not [secret for secret in (b"hunter2hunter2", b"zzzzzzzzzz") if secret in written]
