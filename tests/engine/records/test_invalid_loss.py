"""A run whose loss is NaN or infinite fails, unless `engine.allow_nan`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from hydraloop.engine.device.precision import FP16
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.errors import UserError
from hydraloop.hooks import CheckInvalidLossHook, CheckpointHook, LoggerHook, RuntimeInfoHook
from hydraloop.hooks.check_invalid_loss import InvalidLossError
from tests.helpers import at, logged
from tests.hooks.tiny_runs import batches, engine_of, model
from tests.ranks import on_ranks


def planted(at: int, value: float = math.nan, count: int = 20) -> list[Any]:
    """Batches of which one, counted from 1, has a target that makes the loss `value`."""
    made = batches(count)
    made[at - 1][1][0, 0] = value
    return made


def hooks(*, interval: int | None = 5, **more: Hook) -> dict[str, Hook]:
    found: dict[str, Hook] = {"runtime_info": RuntimeInfoHook(), **more}
    if interval is not None:
        found["logger"] = LoggerHook(interval=interval)
    return found


def failed(engine: Engine) -> tuple[str, Mapping[str, Any]]:
    """The error of a run, and its result."""
    with pytest.raises(UserError) as caught:
        engine.train()
    result: dict[str, Any] = json.loads((engine.run_dir / "result.json").read_text())
    assert (result["status"], result["error"]) == ("failed", str(caught.value))
    return str(caught.value), result


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_run_ends_at_the_first_record_with_such_a_loss(value: float, tmp_path: Path) -> None:
    saving = CheckpointHook(by_epoch=False, interval=1, max_keep_ckpts=None)
    engine = engine_of(tmp_path, hooks(checkpoint=saving), train=planted(7, value), max_epochs=1)
    error, result = failed(engine)
    assert error.splitlines()[0].startswith("engine.allow_nan: the loss is ")
    for remedy in ("hooks=anomaly_detection", "engine.allow_nan=true"):
        assert remedy in error
    assert engine.progress.iteration <= 10
    assert result["objective"] == {"metric": "loss", "rule": "less", "value": "nan", "iteration": 7}
    assert result["best"] is None
    files = {path.stem for path in (tmp_path / "checkpoints").glob("*.pth")}
    assert files == {f"iter_{number}" for number in range(1, 7)}, "none from after the bad loss"
    assert (tmp_path / "checkpoints" / "last_checkpoint").read_text() == "iter_6.pth\n"


@pytest.mark.parametrize("interval", [5, None])
def test_the_record_shows_it_and_without_records_the_end_of_training_decides(
    interval: int | None, tmp_path: Path
) -> None:
    engine = engine_of(tmp_path, hooks(interval=interval), train=planted(18, count=19), max_epochs=1, val=False)
    _, result = failed(engine)
    assert (engine.progress.iteration, result["progress"]["iteration"]) == (19, 19), "three after the last record"
    assert result["objective"] == {"metric": "loss", "rule": "less", "value": "nan", "iteration": 19}
    if interval:
        failed(engine_of(tmp_path / "2", hooks(), train=planted(12), max_epochs=1))
        losses = [record["loss"] for record in logged(tmp_path / "2" / "metrics.jsonl")]
        assert (len(losses), losses[-1]) == (3, None), "the record with NaN is written"


def test_a_run_may_be_told_to_continue(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(tmp_path, hooks(), train=planted(7), max_epochs=1, allow_nan=True, val=False)
    assert engine.train().status == "finished"
    assert [line for line in caplog.messages if "the loss is" in line] == [
        "the loss is nan at iteration 10 or shortly before"
    ], "one warning"


def test_steps_that_fp16_has_skipped_do_not_count(tmp_path: Path) -> None:
    """The batch overflows in the forward pass, and the weights stay as they are."""
    for name, interval in (("records", 5), ("end", None)):
        scaled = FP16(torch.device("cpu"), init_scale=64.0)
        options: dict[str, Any] = {"net": model(), "precision": scaled, "max_epochs": 1, "val": False}
        engine = engine_of(tmp_path / name, hooks(interval=interval), train=planted(7, math.inf), **options)
        assert engine.train().status == "finished"
        assert scaled.skipped == 1
        assert all(bool(value.isfinite().all()) for value in engine.model.parameters())


def test_a_run_that_fp16_ends_because_all_steps_are_skipped_has_nan_too(tmp_path: Path) -> None:
    """Otherwise a sweep would repeat it."""
    train = [(inputs, targets * math.nan) for inputs, targets in batches(20)]
    scaled = FP16(torch.device("cpu"), init_scale=4.0, min_scale=1.0)
    error, result = failed(engine_of(tmp_path, hooks(), train=train, precision=scaled, max_epochs=1))
    assert error.startswith("precision.min_scale: ")
    assert result["objective"]["value"] == "nan"


def test_a_run_resumed_after_a_skipped_step_does_not_count_it_either(tmp_path: Path) -> None:
    saving = at("after_train_iter", lambda engine: engine.request_checkpoint("saved"), nth=8)
    options: dict[str, Any] = {"train": planted(7, math.inf), "max_epochs": 1, "val": False}
    for resume in (None, tmp_path / "checkpoints" / "saved.pth"):
        options["precision"] = FP16(torch.device("cpu"), init_scale=64.0)
        engine = engine_of(tmp_path, hooks(saving=saving), resume=resume, **options)
        assert engine.train().status == "finished"


def test_a_hook_that_checks_the_loss_acts_first(tmp_path: Path) -> None:
    """Their check comes after the record with NaN."""
    saving = CheckpointHook(by_epoch=False, interval=2)
    found = hooks(interval=1, first=CheckInvalidLossHook(interval=7), checkpoint=saving)
    engine = engine_of(tmp_path, found, train=planted(10), max_epochs=1)
    with pytest.raises(InvalidLossError, match="at iteration 10"):
        engine.train()
    assert engine.result is not None
    assert engine.result.objective is not None
    assert math.isnan(engine.result.objective.value)


def on_rank(distributed: Distributed, run_dir: str) -> tuple[str, int]:
    """Train with a NaN on rank 1 only. Without records, and with a checkpoint soon after it."""
    train = planted(3) if distributed.rank else batches(20)
    saving = CheckpointHook(by_epoch=False, interval=4)
    options: dict[str, Any] = {"net": model()[0], "train": train, "val": False, "distributed": distributed}
    options["train"] = [(inputs, targets.repeat(1, 3)[:, :5]) for inputs, targets in train]
    engine = engine_of(Path(run_dir), hooks(interval=None, checkpoint=saving), max_epochs=1, **options)
    with pytest.raises(UserError) as caught:
        engine.train()
    return str(caught.value), engine.progress.iteration


def test_all_ranks_end_if_one_has_it(tmp_path: Path) -> None:
    first, second = on_ranks(2, on_rank, str(tmp_path))
    assert first == second
    assert first[1] == 4
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["status"], result["objective"]["value"]) == ("failed", "nan")
    assert not list((tmp_path / "checkpoints").glob("*.pth"))


def test_an_engine_that_has_failed_can_train_again(tmp_path: Path) -> None:
    """As in a notebook, after the data has been repaired."""
    train = planted(7)
    engine = engine_of(
        tmp_path, hooks(checkpoint=CheckpointHook(by_epoch=False, interval=8)), train=train, max_epochs=1
    )
    failed(engine)
    train[6][1][0, 0] = 0.0
    with torch.no_grad():
        for value in engine.model.state_dict().values():
            value.copy_(torch.ones_like(value))
    engine.optimizer.state.clear()
    result = engine.train()
    assert result.status == "finished"
    assert result.objective is not None
    assert math.isfinite(result.objective.value)
