"""`engine.pause_after`: a run saves and ends after some validations; the continued run equals one that never paused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hydraloop import compose
from hydraloop.config.checks import validate
from hydraloop.data import build_loader
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.run import Settings
from hydraloop.errors import UserError
from hydraloop.files.changes import resumed
from hydraloop.hooks import CheckpointHook, EarlyStoppingHook, EMAHook, LoggerHook, RuntimeInfoHook
from hydraloop.tasks import Regression
from tests.config.composed import REPOSITORY
from tests.engine.distributed.test_equality import dataset
from tests.helpers import EngineWithNeededHooks, at, batches, differences, logged, make_engine
from tests.ranks import on_ranks


def made(distributed: Distributed, run_dir: Path, *, save_best: str | None = "loss", **settings: Any) -> Engine:
    """Six epochs of 4 batches with dropout, shuffling, EMA and AdamW; sanity steps and a test, too."""
    run_dir.mkdir(exist_ok=True)
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Dropout(0.3), torch.nn.Linear(5, 1))
    task = Regression(network, torch.nn.MSELoss())
    part = {"rank": distributed.rank, "world_size": distributed.world_size, "batch_size": 8 // distributed.world_size}
    hooks: dict[str, Hook] = {
        "runtime_info": RuntimeInfoHook(),
        "ema": EMAHook(),
        "early": EarlyStoppingHook(monitor="loss", patience=99),
        "logger": LoggerHook(interval=3),
        "checkpoint": CheckpointHook(interval=1, max_keep_ckpts=1, save_best=save_best),
    }
    return EngineWithNeededHooks(
        task=task,
        optimizer=torch.optim.AdamW(task.parameters(), lr=0.01),
        loaders=Loaders(
            build_loader(dataset(32), shuffle=True, seed=3, **part),
            build_loader(dataset(16), shuffle=False, **part),
            build_loader(dataset(8), shuffle=False, **part),
        ),
        hooks=hooks,
        settings=Settings(**{"device": "cpu", "max_epochs": 6, "sanity_val_steps": 2, **settings}),
        run_dir=run_dir,
        distributed=distributed,
    )


def newest(run_dir: Path) -> Path:
    folder = run_dir / "checkpoints"
    return folder / (folder / "last_checkpoint").read_text().strip()


def trained(distributed: Distributed, run_dir: Path, *pauses: int | None, **settings: Any) -> dict[str, Any]:
    """Train a run in parts, each with one of the values of `pause_after`. Return its end, and where it paused."""
    ends: list[tuple[str, str | None, int, bool]] = []
    resume = None
    for pause_after in pauses:
        engine = made(distributed, run_dir, pause_after=pause_after, resume=resume, **settings)
        found = engine.train()
        ends.append((found.status, found.reason, found.progress["iteration"], found.objective is not None))
        resume = newest(run_dir)
        if found.status == "finished":
            break
    return {
        "ends": ends,
        "weights": engine.model.state_dict(),
        "optimizer": engine.optimizer.state_dict(),
        "hooks": {name: engine.hooks[name].state_dict() for name in ("ema", "early")},
        "metrics": (engine.metrics, engine.evaluator.test_metrics, engine.best and engine.best.value),
        "progress": engine.progress.state_dict(),
    }


def records(run_dir: Path) -> list[dict[str, Any]]:
    found = logged(run_dir / "metrics.jsonl")
    return [{name: value for name, value in record.items() if name != "memory"} for record in found]


def assert_equal(run: dict[str, Any], whole: dict[str, Any], folder: Path) -> None:
    for name in ("weights", "optimizer", "hooks", "metrics", "progress"):
        assert list(differences(run[name], whole[name])) == [], name
    assert records(folder / "parts") == records(folder / "whole")
    assert not (folder / "parts/metrics.cuts.jsonl").exists(), "no validation is repeated"


@pytest.mark.parametrize(
    ("settings", "iterations"),
    [
        ({}, (4, 12)),
        ({"val_interval": 2, "val_begin": 1, "accumulate": 3}, (8,)),  # nothing is left to train after the third
        ({"val_by_epoch": False, "val_interval": 3, "save_best": None}, (3, 9)),
        ({"val_by_epoch": False, "val_interval": 3, "accumulate": 2}, (4, 10)),
    ],
)
def test_a_run_that_paused_equals_one_that_did_not(
    tmp_path: Path, settings: dict[str, Any], iterations: tuple[int, ...]
) -> None:
    whole = trained(Distributed(), tmp_path / "whole", None, **settings)
    run = trained(Distributed(), tmp_path / "parts", 1, 3, None, **settings)
    paused = [
        ("interrupted", f"preempted by engine.pause_after={number}", iteration, True)
        for number, iteration in zip((1, 3), iterations, strict=False)
    ]
    assert run["ends"] == [*paused, ("finished", None, 24, True)]
    assert_equal(run, whole, tmp_path)


def _on_rank(distributed: Distributed, run_dir: str, *pauses: int | None) -> dict[str, Any]:
    return trained(distributed, Path(run_dir), *pauses, val_by_epoch=False, val_interval=3)


@pytest.mark.slow
def test_ranks_pause_together(tmp_path: Path) -> None:
    whole = on_ranks(2, _on_rank, str(tmp_path / "whole"), None)
    runs = on_ranks(2, _on_rank, str(tmp_path / "parts"), 1, 3, None)
    assert runs[0]["ends"] == runs[1]["ends"]
    assert [iteration for _, _, iteration, _ in runs[0]["ends"]] == [3, 9, 24]
    for run, expected in zip(runs, whole, strict=True):
        assert_equal(run, expected, tmp_path)


def test_a_run_that_has_reached_its_pause_pauses_at_once(tmp_path: Path) -> None:
    run = trained(Distributed(), tmp_path, 2, 2, 1)
    assert [iteration for _, _, iteration, _ in run["ends"]] == [8, 8, 8]
    validated = [record["iteration"] for record in records(tmp_path) if record["mode"] == "val"]
    assert validated == [4, 8], "once each"


def test_a_validation_that_is_repeated_counts_once(tmp_path: Path) -> None:
    """The first part has saved the epoch before its validation, and ends in it."""

    def part(hook: Hook, **settings: Any) -> Engine:
        hooks = {"hook": hook, "checkpoint": CheckpointHook(interval=1)}
        engine = make_engine(tmp_path, hooks, val=batches(2), max_epochs=3, pause_after=2, **settings)
        engine.train()
        return engine

    killed = part(at("before_val_iter", lambda engine: engine.requests.preempt("a test"), nth=3))
    assert (killed.progress.epoch, killed.progress.last_validation) == (2, 2)
    engine = part(at("before_train_iter", lambda engine: pytest.fail("trained")), resume=newest(tmp_path))
    assert (engine.requests.preempted_by, engine.progress.last_validation) == ("engine.pause_after=2", 4)


@pytest.mark.parametrize("reason", ["a hook", "engine.max_time=5"])
def test_a_run_that_stops_does_not_pause(tmp_path: Path, reason: str) -> None:
    stops = at("after_val_epoch", lambda engine: engine.request_stop(reason))
    engine = make_engine(
        tmp_path, {"stops": stops, "checkpoint": CheckpointHook(interval=1)}, val=batches(1), max_epochs=3,
        pause_after=1, max_time=5,
    )  # fmt: skip
    found = engine.train()
    assert (found.status, found.reason, found.progress["epoch"]) == ("stopped", reason, 1)


def test_a_pause_fails_if_nothing_is_saved(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, val=batches(1), max_epochs=2, pause_after=1)
    with pytest.raises(UserError, match="the run has no checkpoint hook: the end of training is lost"):
        engine.train()


def test_without_a_validation_a_run_does_not_pause(tmp_path: Path) -> None:
    assert make_engine(tmp_path, pause_after=1, max_epochs=2).train().status == "finished"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("engine.pause_after=0", "0 is below 1"),
        ("engine.val_interval=null", "this needs a validation"),
        ("data.val=null", "this needs a validation"),
    ],
)
def test_a_pause_needs_a_validation(line: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem) as error:
        validate(compose(["engine.pause_after=1", line], folder=REPOSITORY), trains=True)
    assert error.value.key == "engine.pause_after"


def test_another_pause_is_no_change_of_the_config() -> None:
    old, new = ({"config": f"engine: {{pause_after: {number}, max_epochs: {number}}}"} for number in (1, 2))
    assert resumed(old, new) == ["engine.max_epochs: 1 -> 2"]
