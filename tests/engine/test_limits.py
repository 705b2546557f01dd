"""Limits of a run: batches of a loader (`limit_…_batches`), time (`max_time`), validations (`pause_after`)."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hydraloop import compose
from hydraloop.config.checks import validate
from hydraloop.data import build_loader
from hydraloop.engine import requests as requests_module
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook, Mode
from hydraloop.engine.run_parts import Settings
from hydraloop.errors import UserError
from hydraloop.files.changes import resumed
from hydraloop.hooks import CheckpointHook, EarlyStoppingHook, EMAHook, LoggerHook, RuntimeInfoHook
from hydraloop.schemas.option_checks import seconds_of
from hydraloop.tasks import Regression
from tests.config.composed import REPOSITORY
from tests.engine.distributed.test_equality import dataset, network
from tests.helpers import at, batches, differences, logged, make_engine
from tests.ranks import on_ranks

# Batches. ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "expected"), [(None, 20), (1, 1), (20, 20), (99, 20), (0.1, 2), (0.001, 1), (0.29, 6), (1.0, 20)]
)
def test_a_limit_is_a_number_or_a_share(limit: float | None, expected: int) -> None:
    settings = Settings(limit_val_batches=limit)
    assert settings.limited("val", 20) == expected
    assert settings.limited("val", 0) == 0, "no batch of an empty loader"
    assert settings.limited("train", 20) == settings.limited("test", 20) == 20


class Ends(Hook):
    """Notes the iterations at which an epoch ends."""

    def __init__(self) -> None:
        self.seen: list[tuple[Mode, int]] = []

    def after_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Any, mode: Mode) -> None:
        if self.end_of_epoch(engine, batch_idx, mode):
            self.seen.append((mode, batch_idx + 1))


def test_a_limited_run_is_that_of_the_first_batches(tmp_path: Path) -> None:
    limits = {"limit_train_batches": 3, "limit_val_batches": 0.5, "limit_test_batches": 1}
    train, val, test = batches(5), batches(4, seed=1), batches(3, seed=2)
    ends = Ends()
    limited = make_engine(
        tmp_path, {"ends": ends}, train=train, val=val, test=test, accumulate=2, max_epochs=2, **limits
    )
    short = make_engine(tmp_path, train=train[:3], val=val[:2], test=test[:1], accumulate=2, max_epochs=2)
    for engine in (limited, short):
        engine.train()
    assert list(differences(limited.model.state_dict(), short.model.state_dict())) == []
    assert (limited.metrics, limited.evaluator.test_metrics) == (short.metrics, short.evaluator.test_metrics)
    assert limited.progress == short.progress
    assert ends.seen == [("train", 3), ("val", 2), ("train", 3), ("val", 2), ("test", 1)]


# Time. ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(None, math.inf), ("0:30:00", 1800), ("90:00:01", 324001), (5400, 5400), (0.5, 0.5)],
)
def test_a_time_in_seconds(given: Any, seconds: float) -> None:
    assert seconds_of(given) == seconds


@pytest.mark.parametrize("given", ["30", "0:00:00", "1:90:00", "soon", 0, -1, True, [1]])
def test_what_is_not_a_time_is_refused(given: Any) -> None:
    with pytest.raises(UserError, match=r"engine\.max_time: .* is not a time above 0"):
        seconds_of(given)


class Clocked(list[Any]):
    """Batches of which each takes a second of `clock`."""

    def __init__(self, count: int, seconds: float) -> None:
        super().__init__(batches(count))
        self.now, self.seconds = 0.0, seconds

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            self.now += self.seconds
            yield batch


def _timed(distributed: Distributed, run_dir: str, length: int, slow_rank: int, **settings: Any) -> dict[str, Any]:
    """Train up to 20 epochs of `length` batches, of which each takes a second on the slow rank only."""
    train = Clocked(length, float(distributed.rank == slow_rank))
    task = Regression(network(), torch.nn.MSELoss())
    engine = make_engine(
        Path(run_dir),
        {"checkpoint": CheckpointHook(interval=100)},
        train=train,
        val=batches(1),
        test=batches(1),
        task=task,
        distributed=distributed,
        **{"max_epochs": 20, "max_time": "0:00:10", **settings},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(requests_module, "perf_counter", lambda: train.now)
        result = engine.train()
    return {
        "status": result.status,
        "reason": result.reason,
        "iteration": engine.progress.iteration,
        "validated": engine.progress.last_validation,
        "tested": list(result.test_metrics),
        "saved": sorted(path.name for path in Path(run_dir, "checkpoints").glob("*.pth")),
    }


@pytest.mark.parametrize("length", [1, 8, 40])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_run_stops_in_order_after_its_time(tmp_path: Path, length: int, accumulate: int) -> None:
    found = _timed(Distributed(), str(tmp_path), length, 0, accumulate=accumulate)
    window_ends = [end for epoch in range(20) for end in _window_ends(epoch * length, length, accumulate)]
    assert found["iteration"] in window_ends
    assert 10 <= found["iteration"] <= 12 + accumulate
    assert found["validated"] == found["iteration"] // length * length, "at the ends of epochs only"
    assert (found["status"], found["reason"]) == ("stopped", "engine.max_time=0:00:10")
    assert found["tested"] == ["loss"]
    assert len(found["saved"]) == 1


def _window_ends(first: int, length: int, accumulate: int) -> list[int]:
    return [first + min(end, length) for end in range(accumulate, length + accumulate, accumulate)]


class Validations(Hook):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def after_val_epoch(self, engine: Engine, metrics: Any) -> None:
        self.seen.append(engine.progress.iteration)


@pytest.mark.parametrize("by_epoch", [True, False])
def test_a_run_that_is_stopped_again_and_again_ends_as_one_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_epoch: bool
) -> None:
    """Each validation counts: for early stopping, for the best checkpoint, for a plateau."""
    clock = itertools.count()
    monkeypatch.setattr(requests_module, "perf_counter", lambda: next(clock))

    def run(name: str, resume: Path | None = None, **settings: Any) -> tuple[Engine, list[int]]:
        (tmp_path / name).mkdir(exist_ok=True)
        seen = Validations()
        hooks = {
            "early": EarlyStoppingHook(monitor="loss", patience=2, min_delta=0.5),
            "checkpoint": CheckpointHook(interval=100, save_best="loss"),
            "seen": seen,
        }
        engine = make_engine(
            tmp_path / name, hooks, train=batches(7), val=batches(2, seed=1), test=batches(1), max_epochs=9,
            val_interval=1 if by_epoch else 7, val_by_epoch=by_epoch, resume=resume, **settings,
        )  # fmt: skip
        assert engine.train().status in ("stopped", "finished")
        return engine, seen.seen

    whole, expected = run("whole")
    assert whole.requests.stop_reason is not None
    assert "early" in whole.requests.stop_reason
    found: list[int] = []
    engine, last = None, None
    while engine is None or engine.requests.stop_reason == engine.settings.out_of_time:
        engine, seen = run("parts", resume=last, max_time=8)
        last, found = engine.checkpoints.last_checkpoint, found + seen
    assert len(found) >= 2
    assert found == expected
    assert list(differences(engine.model.state_dict(), whole.model.state_dict())) == []
    assert (engine.best, engine.requests.stop_reason) == (
        whole.best and dataclasses.replace(whole.best, checkpoint=engine.best.checkpoint),
        whole.requests.stop_reason,
    )


def test_the_time_of_one_rank_stops_all(tmp_path: Path) -> None:
    one, other = on_ranks(2, _timed, str(tmp_path), 40, 1)
    assert one == other
    assert one["status"] == "stopped"
    assert 10 <= one["iteration"] < 40, "inside the first epoch"


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
    return make_engine(
        run_dir,
        hooks,
        train=build_loader(dataset(32), shuffle=True, seed=3, **part),
        val=build_loader(dataset(16), shuffle=False, **part),
        test=build_loader(dataset(8), shuffle=False, **part),
        task=task,
        optimizer=torch.optim.AdamW(task.parameters(), lr=0.01),
        distributed=distributed,
        **{"max_epochs": 6, "sanity_val_steps": 2, **settings},
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
