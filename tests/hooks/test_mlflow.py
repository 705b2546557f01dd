"""MLflowLoggerHook: a real run with its follower, over SQLite. What is sent, and when, is in tests/tracking."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.errors import UserError
from hydraloop.hooks import LoggerHook, MLflowLoggerHook
from hydraloop.tracking import sync
from hydraloop.tracking.follower.cursor import Cursor
from tests.helpers import at, batches, make_engine
from tests.processes import children
from tests.tracking.mlflow.runs import QUIET, client, empty_database, folder

__all__ = ["empty_database", "folder"]
pytestmark = QUIET


@pytest.mark.parametrize(
    ("options", "key", "remedy"),
    [
        ({"system_metrics_interval": 0.0}, "system_metrics_interval", "above 0"),
        ({"system_metrics_interval": float("nan")}, "system_metrics_interval", "above 0"),
        ({"checkpoints": "lst"}, "checkpoints", "last"),
        ({"flush_timeout": -1.0}, "flush_timeout", "0 or more"),
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
    history = client().get_metric_history(found.info.run_id, "perf/memory")
    assert [metric.step for metric in history] == [1, 2, 3]
    assert "val/loss" in found.data.metrics


def test_sync_uses_the_server_of_the_run_and_not_of_the_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    cursor, summary = run(folder / "run", flush_timeout=0.0)
    assert summary.startswith("0 of 4 records sent")
    assert "; python -m hydraloop sync" in summary
    assert not cursor.finished
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert sync.main([str(folder / "run")]) == 1, "not sent to the database in this folder"
    assert "0 of 4 records there; not all: " in (said := capsys.readouterr().out)
    assert "127.0.0.1:9" in said


@pytest.mark.slow
def test_a_validation_without_training(folder: Path) -> None:
    made(folder / "run", flush_timeout=60.0).validate()
    cursor = Cursor.load(folder / "run", "mlflow")
    assert cursor is not None
    assert "val/loss" in client().get_run(cursor.memory["run_id"]).data.metrics


def test_an_invalid_address_ends_the_run_with_on_error_raise(folder: Path) -> None:
    engine = made(folder / "run", tracking_uri="foo://server", flush_timeout=60.0)
    engine.stages._policies["mlflow"].on_error = "raise"
    with pytest.raises(UserError, match="foo") as raised:
        engine.train()
    assert raised.value.key == "hooks.mlflow"
    assert engine.progress.iteration == 0


# Other ranks. --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("node", "local_rank", "options", "number"),
    [
        (1, 0, {"system_metrics_nodes": True}, 1),
        (1, 0, {}, 0),
        (1, 0, {"system_metrics_nodes": True, "system_metrics": False}, 0),
        (1, 1, {"system_metrics_nodes": True}, 0),
        (0, 1, {"system_metrics_nodes": True}, 0),
    ],
)
def test_the_first_rank_of_another_machine_logs_its_load_and_others_nothing(
    folder: Path, node: int, local_rank: int, options: dict[str, Any], number: int
) -> None:
    ranks = Distributed()
    ranks.rank, ranks.world_size, ranks.local_world_size = 2 * node + local_rank, 4, 2
    ranks.local_rank, ranks.node_rank = local_rank, node
    seen: list[list[str]] = []
    look = at("after_train_iter", lambda engine: seen.append(_children()))
    make_engine(
        folder,
        {"logger": LoggerHook(interval=1), "mlflow": MLflowLoggerHook(**options), "look": look},
        engine=cast(type[Engine], partial(Engine, distributed=ranks)),
    ).train()
    ((*started,),) = seen
    assert [line.split()[-1] for line in started] == ["hydraloop.tracking.mlflow.node"] * number
    assert _children() == []
    written = [path.name for path in (folder / "tracking").glob("*")]
    assert written == ["mlflow.node_1.log"] * number, "rank 0 writes the rest"


def _children() -> list[str]:
    """Command lines of child processes that are a follower or log a machine's load."""
    lines = [" ".join(command) for command in children().values()]
    return [line for line in lines if "hydraloop.tracking" in line]


def test_rank_0_says_that_a_file_is_not_on_other_machines(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    ranks = Distributed()
    ranks.world_size = 2
    make_engine(
        folder,
        {"logger": LoggerHook(), "mlflow": MLflowLoggerHook(system_metrics_nodes=True, flush_timeout=0.0)},
        engine=cast(type[Engine], partial(Engine, distributed=ranks)),
    ).train()
    said = [message for message in caplog.messages if "only if all machines share its folder" in message]
    assert len(said) == 1
