"""A run whose loss or weights are NaN or infinite fails, unless `engine.allow_nan`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.distributed.fsdp import local
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.loss_check import not_finite
from hydraloop.engine.precision import FP16
from hydraloop.errors import UserError
from hydraloop.files.result import Best
from hydraloop.hooks import CheckInvalidLossHook, CheckpointHook, EMAHook, LoggerHook, RuntimeInfoHook
from hydraloop.hooks.check_invalid_loss import InvalidLossError
from tests.helpers import at, logged
from tests.hooks.tiny_runs import Scripted, batches, engine_of, load, model
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
    assert [line for line in caplog.messages if "the loss is" in line] == ["the loss is nan at iteration 7"], (
        "one warning"
    )


def test_steps_that_fp16_has_skipped_do_not_count(tmp_path: Path) -> None:
    """The batch overflows in the forward pass, and the weights stay as they are."""
    for name, interval in (("records", 5), ("end", None)):
        scaled = FP16(torch.device("cpu"), init_scale=64.0)
        options: dict[str, Any] = {"net": model(), "precision": scaled, "max_epochs": 1, "val": False}
        engine = engine_of(tmp_path / name, hooks(interval=interval), train=planted(7, math.inf), **options)
        assert engine.train().status == "finished"
        assert scaled.skipped == 1
        assert all(bool(value.isfinite().all()) for value in engine.model.parameters())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_loss_of_a_step_that_any_hook_skips_does_not_count(accumulate: int, tmp_path: Path) -> None:
    """The hook only calls `skip_step`. The records and `check_invalid_loss` look at the loss inside the window."""

    def skip_bad(engine: Engine) -> None:
        if any(parameter.grad is not None and parameter.grad.isnan().any() for parameter in engine.model.parameters()):
            engine.skip_step()

    more = {"skip": at("before_optimizer_step", skip_bad, nth=0), "check": CheckInvalidLossHook(interval=1)}
    engine = engine_of(tmp_path, hooks(interval=1, **more), train=planted(7), accumulate=accumulate, max_epochs=1)
    assert engine.train().status == "finished"
    assert engine.progress.optimizer_step == 20 // accumulate - 1


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
    assert engine.outcome.result is not None
    assert engine.outcome.result.objective is not None
    assert math.isnan(engine.outcome.result.objective.value)


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


# Weights. The loss stays finite. -------------------------------------------------------------------------------------


class Masked(nn.Linear):
    """Computes with 0 in place of weights that are NaN or infinite."""

    def forward(self, batch: Tensor) -> Tensor:
        return nn.functional.linear(batch, self.weight.nan_to_num(0.0, 0.0, 0.0), self.bias)


def masked() -> nn.Sequential:
    """A model whose loss never shows weights that are NaN."""
    torch.manual_seed(0)
    return nn.Sequential(Masked(3, 5), nn.Tanh(), nn.Linear(5, 2))


def spoil(engine: Engine, value: float = math.nan) -> None:
    """Give a weight a gradient that is NaN, as the root of 0 does."""
    gradient = engine.model.get_parameter("0.weight").grad
    assert gradient is not None
    local(gradient)[-1, -1] = value


def stems(run_dir: Path) -> set[str]:
    return {path.stem for path in (run_dir / "checkpoints").glob("*.pth")}


WEIGHTS = "engine.allow_nan: weights are NaN or infinite at iteration {}: 0.weight\n"


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_no_checkpoint_has_such_weights_and_the_last_healthy_one_stays(
    value: float, asynchronous: bool, tmp_path: Path
) -> None:
    saving = CheckpointHook(
        by_epoch=False, interval=2, max_keep_ckpts=1, asynchronous=asynchronous, published_keys=["state_dict"]
    )
    bad = at("before_optimizer_step", lambda engine: spoil(engine, value), nth=6)
    found = hooks(interval=1, bad=bad, checkpoint=saving)
    engine = engine_of(tmp_path, found, net=masked(), train=batches(40), max_epochs=1)
    error, result = failed(engine)
    assert error.startswith(WEIGHTS.format(6))
    assert "hooks=anomaly_detection" in error
    assert result["objective"]["value"] == "nan"
    assert stems(tmp_path) == {"iter_4"}, "nor is it published"
    assert (tmp_path / "checkpoints" / "last_checkpoint").read_text() == "iter_4.pth\n"
    saved = load(tmp_path / "checkpoints" / "iter_4.pth")
    assert all(bool(weight.isfinite().all()) for weight in saved["state_dict"].values())


def preempt(engine: Engine) -> None:
    engine.requests.preempt("a signal")


def ask(engine: Engine) -> None:
    engine.request_checkpoint("asked")


@pytest.mark.parametrize("request_", [preempt, ask, None])
def test_neither_a_preemption_nor_a_request_nor_the_end_of_training_saves_them(
    request_: Callable[[Engine], None] | None, tmp_path: Path
) -> None:
    """None: without a checkpoint hook, the run must not end as finished."""
    found = hooks(bad=at("before_optimizer_step", spoil, nth=6))
    if request_ is not None:
        found |= {"ask": at("after_train_iter", request_, nth=6), "checkpoint": CheckpointHook()}
    error, _ = failed(engine_of(tmp_path, found, net=masked(), train=batches(8), max_epochs=1, val=False))
    assert error.startswith(WEIGHTS.format(6 if request_ else 8))
    assert stems(tmp_path) == set()


def test_a_validation_with_such_weights_is_not_saved(tmp_path: Path) -> None:
    saving = CheckpointHook(interval=None, save_best=["score", "loss"])
    found = hooks(bad=at("before_optimizer_step", spoil, nth=6), checkpoint=saving)
    metrics = {"score": Scripted([0.1, 0.9, 1.0], higher_is_better=True)}
    engine = engine_of(tmp_path, found, net=masked(), metrics=metrics)
    failed(engine)
    assert stems(tmp_path) == {"best_score_epoch_1", "best_loss_epoch_1"}
    assert engine.best == Best("score", 0.9, 8), "and no checkpoint has these weights"
    assert engine.outcome.result is not None
    assert engine.outcome.result.objective is not None
    assert math.isnan(engine.outcome.result.objective.value)


def test_averages_are_weights_too(tmp_path: Path) -> None:
    def formula(average: Tensor, weights: Tensor, updates: int) -> Tensor:
        return weights / (updates < 3)

    found = hooks(ema=EMAHook(weight=formula), checkpoint=CheckpointHook(by_epoch=False, interval=2))
    error, _ = failed(engine_of(tmp_path, found, net=masked()))
    assert "at iteration 4: the average of 0.weight, the average of 0.bias" in error
    assert stems(tmp_path) == {"iter_2"}


def test_other_values_may_be_infinite_and_large_weights_are_finite(tmp_path: Path) -> None:
    net = masked()
    net.register_buffer("mask", torch.full((3,), -math.inf))
    net[2].weight.requires_grad_(False).fill_(3e38)  # their sum is not finite
    net[2].register_forward_pre_hook(lambda module, inputs: inputs[0] * 0)
    engine = engine_of(tmp_path, hooks(checkpoint=CheckpointHook()), net=net)
    assert engine.train().status == "finished"
    assert stems(tmp_path) == {"epoch_1", "epoch_2", "epoch_3"}


def test_a_run_may_be_told_to_save_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = hooks(bad=at("before_optimizer_step", spoil, nth=6), checkpoint=CheckpointHook())
    assert engine_of(tmp_path, found, net=masked(), allow_nan=True).train().status == "finished"
    assert stems(tmp_path) == {"epoch_1", "epoch_2", "epoch_3"}
    assert len([line for line in caplog.messages if "weights are NaN" in line]) == 1


def every_kind() -> dict[str, Tensor]:
    """Finite tensors of all types that a parameter may have."""
    found = {str(dtype): torch.full((300,), 200.0, dtype=dtype) for dtype in FLOATS}
    found["complex"] = torch.ones(3, dtype=torch.complex64)
    return {
        **found,
        "integers": torch.ones(3, dtype=torch.int64),
        "empty": torch.empty(0),
        "sliced": torch.ones(4, 4)[:, 1],
    }


FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2)


def test_every_type_of_weights_is_checked() -> None:
    assert not_finite(every_kind()) == []
    for name, good in every_kind().items():
        if good.numel() and name != "integers":
            spoilt = good.clone()
            spoilt[-1] = math.nan
            assert not_finite({**every_kind(), name: spoilt}) == [name]


def train_on_rank(distributed: Distributed, run_dir: str, saves: bool) -> str:
    """Train with FSDP2 or DDP; the weight that becomes NaN is in the shard of the last rank."""
    net = masked()
    distributed.prepare(net)
    bad = at("before_optimizer_step", lambda engine: spoil(engine) if engine.distributed.rank else None, nth=6)
    if not distributed.sharded:
        bad = at("before_optimizer_step", spoil, nth=6)
    found = hooks(bad=bad, **({"checkpoint": CheckpointHook(by_epoch=False, interval=2)} if saves else {}))
    options: dict[str, Any] = {"net": net, "train": batches(8), "val": False, "distributed": distributed}
    engine = engine_of(Path(run_dir), found, max_epochs=1, **options)
    with pytest.raises((UserError, RuntimeError)) as caught:
        engine.train()
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_all_ranks_end_if_the_weights_of_one_are_nan(strategy: str, saves: bool, tmp_path: Path) -> None:
    told = on_ranks(2, train_on_rank, str(tmp_path), saves, strategy=strategy)
    error = WEIGHTS.format(6 if saves else 8)
    assert f"UserError: {error}" in told[0]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["status"] == "failed"
    assert error.strip() in result["error"]
    assert result["objective"]["value"] == "nan"
    assert stems(tmp_path) == ({"iter_2", "iter_4"} if saves else set())
