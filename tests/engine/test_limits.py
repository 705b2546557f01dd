"""Limits of a run: batches of a loader (`limit_…_batches`) and time (`max_time`)."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hydraloop.engine import requests as requests_module
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook, Mode
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.run import Settings
from hydraloop.errors import UserError
from hydraloop.hooks import CheckpointHook, EarlyStoppingHook
from hydraloop.schemas.option_checks import seconds_of
from hydraloop.tasks import Regression
from tests.engine.distributed.test_equality import network
from tests.helpers import EngineWithNeededHooks, batches, differences, make_engine
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
    engine = EngineWithNeededHooks(
        task=task,
        optimizer=torch.optim.SGD(task.parameters(), lr=0.01),
        loaders=Loaders(train, batches(1), batches(1)),
        hooks={"checkpoint": CheckpointHook(interval=100)},
        settings=Settings(**{"device": "cpu", "max_epochs": 20, "max_time": "0:00:10", **settings}),
        run_dir=Path(run_dir),
        distributed=distributed,
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
