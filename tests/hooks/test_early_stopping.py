"""EarlyStoppingHook: stops at the same epoch as mmengine; resumed runs, two ranks, and errors."""

from __future__ import annotations

import json
import logging
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.errors import UserError
from hydraloop.files.result import Result
from hydraloop.hooks.early_stopping import EarlyStoppingHook
from hydraloop.tasks.task import Task
from tests.hooks.tiny_runs import Scripted, batches, engine_of, model
from tests.ranks import on_ranks


def _stops_at(values: list[float], options: dict[str, Any]) -> int | None:
    """The epoch at which the hook asks for a stop."""
    hook, reasons = EarlyStoppingHook(**options), []
    engine: Any = SimpleNamespace(
        validations=SimpleNamespace(metric_names=("score",), objective=("score", None)),
        loaders=SimpleNamespace(val=[]),
        settings=SimpleNamespace(val_interval=1),
        progress=SimpleNamespace(epoch=0, iteration=0, batch_in_epoch=0),
        task=SimpleNamespace(higher_is_better=lambda name: None),
        request_stop=lambda reason, agreed: reasons.append(reason),
    )
    hook.before_run(engine)
    hook.before_train(engine)
    for engine.progress.epoch, value in enumerate(values, start=1):
        engine.validations.comparable = {"score": value}
        hook.after_val_epoch(engine, {"score": value})
        if reasons:
            return int(engine.progress.epoch)
    return None


@pytest.mark.parametrize(
    ("options", "values", "epoch"),
    [
        (
            {"rule": "greater", "min_delta": 0.1, "patience": 2},
            [0.5, 0.6, 0.6, 0.7, 0.65, 0.75, 0.7],
            6,
        ),
        ({"rule": "greater", "min_delta": 0.1, "patience": 3}, [1.0, 1.0, 1.0, 1.0], 4),
        (
            {"rule": "greater", "min_delta": 0.1, "patience": 2},
            [0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3],
            7,
        ),
        ({"rule": "less", "min_delta": 0.25, "patience": 3}, [3.0, 2.0, 1.0, 2.0, 3.0, 4.0], 6),
        ({"rule": "less", "min_delta": 0.1, "patience": 1}, [3.0, 2.0, 1.0, 2.0, 3.0, 4.0], 4),
        ({"rule": "greater", "min_delta": 1e-09, "patience": 0}, [0.5, 0.6, 0.55], 3),
        ({"rule": "greater", "min_delta": 0.1}, [0.1, inf, 0.2, 0.3], 2),
        ({"rule": "less", "min_delta": 0.1, "patience": 1, "check_finite": False}, [-inf, 0.1, 0.1, 0.1], 2),
        ({"rule": "less", "min_delta": 0.1, "patience": 2, "check_finite": False}, [inf, 0.9, 0.8, 0.8, 0.8], 5),
        ({"rule": "greater", "min_delta": 0.1, "stopping_threshold": 0.6}, [0.5, 0.6, 0.6, 0.7], 4),
        ({"rule": "less", "min_delta": 0.1, "stopping_threshold": -0.3}, [0.5, -0.3, -0.4], 3),
    ],
)
def test_it_stops_at_the_epoch_at_which_mmengine_does(
    options: dict[str, Any], values: list[float], epoch: int | None
) -> None:
    """By hand from mmengine 0.10.7, hooks/early_stopping_hook.py, EarlyStoppingHook._check_stop_condition."""
    assert _stops_at(values, options) == epoch


def test_a_nan_is_no_improvement(tmp_path: Path) -> None:
    """mmengine, with check_finite=false, keeps it as the best value, so that each later value is an improvement."""
    options = {"rule": "greater", "patience": 3, "min_delta": 0.0, "check_finite": False}
    values = [0.9, nan, 0.1, 0.1, 0.1, 0.1]
    assert _stops_at(values, options) == 4
    assert _stops_at([nan, nan, nan, nan], options) == 3


def test_by_default_any_improvement_counts_and_an_equal_value_is_none(tmp_path: Path) -> None:
    """mmengine, with min_delta=0, counts an equal value as an improvement, so a collapsed model trains forever."""
    small_steps = [0.9 + 0.001 * step for step in range(12)]
    assert _stops_at(small_steps, {"rule": "greater"}) is None
    assert _stops_at([-value for value in small_steps], {"rule": "less"}) is None
    assert _stops_at([0.1] + [0.5] * 9, {"rule": "greater"}) == 7
    assert _stops_at([0.9] + [0.5] * 9, {"rule": "less"}) == 7


# The run. ------------------------------------------------------------------------------------------------------------


def _engine(run_dir: Path, values: list[float], hooks: dict[str, Hook], **settings: Any) -> Engine:
    metrics = {"score": Scripted(values, higher_is_better=True)}
    return engine_of(run_dir, hooks, metrics=metrics, train=batches(2), **{"max_epochs": 9, **settings})


def test_the_log_and_the_result_say_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    hook = EarlyStoppingHook(patience=2, min_delta=0.05)  # of the first metric, whose direction is known
    result = _engine(tmp_path, [0.5, 0.75, 0.76, 0.7], {"early_stopping": hook}).train()
    reason = "early_stopping: score 0.7 at epoch 4 has not improved on 0.75 by 0.05 in 2 validations"
    assert (result.status, result.reason, result.progress["epoch"]) == ("stopped", reason, 4)
    assert json.loads((tmp_path / "result.json").read_text())["reason"] == reason
    assert f"stopping: {reason}" in caplog.text


@pytest.mark.parametrize(
    ("options", "values", "reason"),
    [
        ({}, [0.5, nan], "score nan at epoch 2 is not finite"),
        ({}, [inf], "score inf at epoch 1 is not finite"),
        ({"stopping_threshold": 0.7}, [0.5, 0.8], "is above the stopping_threshold 0.7"),
        ({"patience": 2}, [0.5, 0.6, 0.6, 0.5], "score 0.5 at epoch 4 has not improved on 0.6 in 2 validations"),
        ({"patience": 2, "min_delta": 0.1, "rule": "less"}, [0.5, 0.45, 0.48], "on 0.5 by 0.1 in 2 validations"),
        ({"patience": 2, "check_finite": False}, [0.5, nan, 0.2, 0.3], "on 0.5 in 2 validations"),
        ({"stopping_threshold": 0.7, "rule": "less"}, [0.7, 0.6], "0.6 at epoch 2 is below the stopping_threshold 0.7"),
    ],
)
def test_each_reason_is_reported(options: dict[str, Any], values: list[float], reason: str, tmp_path: Path) -> None:
    result = _engine(tmp_path, values, {"early_stopping": EarlyStoppingHook(**options)}).train()
    assert reason in str(result.reason)


def test_validations_by_iteration_count_as_well(tmp_path: Path) -> None:
    hook = EarlyStoppingHook(patience=2)
    settings = {"val_by_epoch": False, "val_interval": 3}
    engine = _engine(tmp_path, [0.5, 0.4, 0.3], {"early_stopping": hook}, **settings)
    assert engine.train().progress["iteration"] == 9
    assert "score 0.3 at iteration 9 has not improved on 0.5 in 2" in str(engine.requests.stop_reason)


def test_a_validation_outside_of_training_does_not_count(tmp_path: Path) -> None:
    hook = EarlyStoppingHook(patience=1)
    engine = _engine(tmp_path, [0.1, 0.9, 0.8, 0.1, 0.1], {"early_stopping": hook}, max_epochs=1)
    engine.validate()
    assert (hook.last_improvement, hook.wait_count) == (None, 0)
    engine.train()
    assert (hook.last_improvement, hook.wait_count) == (0.9, 0)
    engine.validate()
    assert (hook.last_improvement, hook.wait_count, engine.requests.stop_reason) == (0.9, 0, None)


class Saving(Hook):
    """Asks for a checkpoint at each epoch's end, before its validation."""

    def after_train_epoch(self, engine: Engine) -> None:
        engine.request_checkpoint(f"saved_{engine.progress.epoch}")


VALUES = [0.5, 0.9, 0.6, 0.85, 0.7, 0.8, 0.9, 0.9, 0.9]


@pytest.mark.parametrize("epoch", [1, 2, 3, 4, 5])
def test_a_resumed_run_stops_at_the_same_epoch(epoch: int, tmp_path: Path) -> None:
    def hooks() -> dict[str, Hook]:
        return {"early_stopping": EarlyStoppingHook(patience=4), "saving": Saving()}

    whole = _engine(tmp_path, VALUES, hooks()).train()
    assert whole.progress["epoch"] == 6
    saved = tmp_path / "checkpoints" / f"saved_{epoch}.pth"
    # Its first validation is the one that was still to come when the file was written.
    resumed = _engine(tmp_path / "resumed", VALUES[epoch - 1 :], hooks(), resume=saved).train()
    assert (resumed.progress["epoch"], resumed.reason) == (6, whole.reason)


STOPPING: list[tuple[dict[str, Any], list[float]]] = [
    ({"patience": 2}, [0.5, 0.4, 0.3]),
    ({"stopping_threshold": 0.7}, [0.5, 0.8]),
    ({}, [0.5, nan]),
    ({"patience": 2, "min_delta": 0.2}, [0.5, 0.6, 0.65]),
]


def _stopped(run_dir: Path, options: dict[str, Any], values: list[float]) -> tuple[Result, Path]:
    """A stopped run, and its checkpoint after the validation that stopped it."""
    hooks = {"early_stopping": EarlyStoppingHook(**options), "saving": AfterValidation()}
    result = _engine(run_dir, values, hooks).train()
    assert (result.status, result.progress["epoch"]) == ("stopped", len(values))
    return result, run_dir / "checkpoints" / f"validated_{len(values)}.pth"


class AfterValidation(Hook):
    """Requests a checkpoint after each validation, as `save_best` does."""

    def after_val_epoch(self, engine: Engine, metrics: Any) -> None:
        engine.request_checkpoint(f"validated_{engine.progress.epoch}")


@pytest.mark.parametrize(("options", "values"), STOPPING)
def test_a_stopped_run_is_stopped_when_it_is_resumed(
    options: dict[str, Any], values: list[float], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, saved = _stopped(tmp_path, options, values)
    hooks = {"early_stopping": EarlyStoppingHook(**options), "saving": AfterValidation()}
    resumed = _engine(tmp_path / "resumed", VALUES, hooks, resume=saved).train()
    assert (resumed.status, resumed.reason, resumed.progress) == ("stopped", whole.reason, whole.progress)
    assert "this run was stopped; to continue training" in caplog.text


@pytest.mark.parametrize(
    ("options", "values", "changed"),
    [
        (*STOPPING[0], {"patience": 3}),
        (*STOPPING[0], {"monitor": "loss", "patience": 9}),
        (*STOPPING[0], {"rule": "less"}),
        (*STOPPING[1], {"stopping_threshold": None}),
        (*STOPPING[2], {"check_finite": False}),
    ],
)
def test_a_stopped_run_continues_with_other_options(
    options: dict[str, Any], values: list[float], changed: dict[str, Any], tmp_path: Path
) -> None:
    _, saved = _stopped(tmp_path, options, values)
    hooks = {"early_stopping": EarlyStoppingHook(**{**options, **changed}), "saving": AfterValidation()}
    resumed = _engine(tmp_path / "resumed", VALUES, hooks, resume=saved).train()
    assert resumed.progress["epoch"] > len(values)


def test_an_engine_that_was_stopped_is_used_again(tmp_path: Path) -> None:
    hook = EarlyStoppingHook(patience=2)
    engine = _engine(tmp_path, [0.5, 0.4, 0.3, *VALUES], {"early_stopping": hook})
    reason = engine.train().reason
    again = engine.train()
    assert (again.status, again.reason, again.progress["epoch"]) == ("stopped", reason, 3)
    hook.patience = 4
    assert engine.train().progress["epoch"] > 3


def test_another_metric_is_followed_from_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _engine(tmp_path, VALUES, {"early_stopping": EarlyStoppingHook(patience=4), "saving": Saving()}).train()
    hook = EarlyStoppingHook(monitor="loss", patience=9)
    engine = _engine(
        tmp_path / "resumed",
        VALUES,
        {"early_stopping": hook, "saving": Saving()},
        resume=tmp_path / "checkpoints" / "saved_5.pth",
        max_epochs=5,
    )
    engine.train()
    assert hook.last_improvement == engine.metrics["loss"]
    assert "this run monitored score until now" in caplog.text


def on_rank(distributed: Distributed, run_dir: str) -> tuple[int, str | None]:
    """Rank 1's own metric would never stop it."""
    values = VALUES if distributed.is_main else [float(value) for value in range(9)]
    hooks: dict[str, Hook] = {"early_stopping": EarlyStoppingHook(patience=3)}
    engine = _engine(Path(run_dir), values, hooks, distributed=distributed)
    return engine.train().progress["epoch"], engine.requests.stop_reason


def test_ranks_stop_together(tmp_path: Path) -> None:
    first, second = on_ranks(2, on_rank, str(tmp_path))
    assert first == second
    assert first[0] == 5


# What it refuses. ----------------------------------------------------------------------------------------------------


class Forgetful(Task):
    """Has no score in its second validation."""

    validations = 0

    def compute_metrics(self, *ways: Any) -> dict[str, float]:
        metrics = super().compute_metrics(*ways)
        self.validations += 1
        if self.validations == 2:
            del metrics["score"]
        return metrics


def _forgetful(run_dir: Path, hook: EarlyStoppingHook) -> Engine:
    score = Scripted([0.9, 0.8, 0.7, 0.6, 0.5], True)
    task = Forgetful(model(), torch.nn.functional.mse_loss, {"score": score})
    return engine_of(run_dir, {"early_stopping": hook}, task=task, max_epochs=5, sanity_val_steps=1)


def test_a_missing_metric_is_left_out_or_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert _forgetful(tmp_path, EarlyStoppingHook(patience=2)).train().progress["epoch"] == 4
    assert "hooks.early_stopping: the validation has no 'score', only: loss; it does not count" in caplog.text
    with pytest.raises(RuntimeError, match="no 'score', only: loss"):
        _forgetful(tmp_path, EarlyStoppingHook(patience=2, strict=True)).train()


@pytest.mark.parametrize(
    ("options", "settings", "key", "remedy"),
    [
        ({"monitor": "scores"}, {}, "hooks.early_stopping.monitor", "Did you mean score?"),
        ({}, {"val_interval": None}, "hooks.early_stopping", "engine.val_interval=1"),
        ({}, {"val": False}, "hooks.early_stopping", "data.val"),
    ],
)
def test_mistakes_come_before_the_first_iteration(
    options: dict[str, Any], settings: dict[str, Any], key: str, remedy: str, tmp_path: Path
) -> None:
    engine = _engine(tmp_path, [0.5], {"early_stopping": EarlyStoppingHook(**options)}, **settings)
    with pytest.raises(UserError) as raised:
        engine.train()
    assert raised.value.key == key
    assert remedy in str(raised.value.remedy)
    assert engine.progress.iteration == 0


def test_a_metric_without_a_direction_needs_a_rule(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, {"early_stopping": EarlyStoppingHook()}, metrics={"score": Scripted([0.5])})
    with pytest.raises(UserError, match=r"hooks\.early_stopping\.rule"):
        engine.train()
