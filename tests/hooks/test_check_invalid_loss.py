"""CheckInvalidLossHook: which iteration, samples and parameters; over epochs, accumulated, in fp16, on ranks."""

from __future__ import annotations

import json
import math
import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hydraloop.data import build_loader
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.distributed.fsdp import whole
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook, OnError
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.precision import Precision
from hydraloop.hooks import CheckInvalidLossHook, CheckpointHook, DistSamplerSeedHook
from hydraloop.hooks.check_invalid_loss import InvalidLossError, _norms
from hydraloop.tasks import Regression
from tests.helpers import HostSyncs, at
from tests.hooks.tiny_runs import engine_of
from tests.ranks import on_ranks

SAMPLES, BATCH = 22, 4
"""Six batches an epoch, the last of two samples."""


class Poison(Hook):
    """Puts a value into the inputs of some iterations (from 1), and keeps which samples they had."""

    def __init__(self, iterations: Sequence[int], value: float = math.nan) -> None:
        self._iterations, self._value = [*iterations], value
        self.samples: list[list[int]] = []

    def before_train_iter(self, engine: Engine, batch_idx: int, batch: Any) -> None:
        if engine.progress.iteration + 1 in self._iterations:
            self.samples.append((batch[0][:, 0] * SAMPLES).round().int().tolist())
            batch[0].fill_(self._value)


def _engine(
    run_dir: Path,
    hooks: dict[str, Hook],
    *,
    loader: Any = None,
    distributed: Distributed | None = None,
    precision: Precision | None = None,
    on_error: dict[str, OnError] | None = None,
    **settings: Any,
) -> Engine:
    """Three epochs on samples whose first feature is their index."""
    torch.manual_seed(0)
    inputs = torch.cat([torch.arange(SAMPLES)[:, None] / SAMPLES, torch.randn(SAMPLES, 2)], dim=1)
    ranks = distributed or Distributed()
    if loader is None:
        loader = build_loader(
            TensorDataset(inputs, torch.randn(SAMPLES, 1)),
            shuffle=True,
            batch_size=BATCH,
            rank=ranks.rank,
            world_size=ranks.world_size,
        )
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    ranks.prepare(model)
    return engine_of(
        run_dir,
        hooks,
        task=Regression(model, nn.MSELoss()),
        loaders=Loaders(loader),
        on_error=on_error,
        distributed=distributed,
        precision=precision,
        **settings,
    )


def _raised(engine: Engine) -> InvalidLossError:
    with pytest.raises(InvalidLossError) as raised:
        engine.train()
    return raised.value


def _place(error: InvalidLossError) -> tuple[int, int, list[int]]:
    """The iteration, the batch in its epoch, and its samples, as the message names them; no samples if not known."""
    place = re.search(r"at iteration (\d+)(?:, noticed .*)?\n  batch (\d+) .*; (?:its samples .*: (.*))?", str(error))
    assert place is not None
    return int(place[1]), int(place[2]), [int(number) for number in (place[3] or "").split(", ") if number]


def test_the_error_says_where_it_began(tmp_path: Path) -> None:
    hooks = {
        "check": CheckInvalidLossHook(interval=5),
        "sampler_seed": DistSamplerSeedHook(),
        "poison": (bad := Poison([8])),
    }
    engine = _engine(tmp_path, hooks)
    error = _raised(engine)
    assert _place(error) == (8, 1, bad.samples[0])
    listed = ", ".join(map(str, bad.samples[0]))
    assert error.problem == (
        "the loss is nan at iteration 8, noticed at iteration 10\n"
        f"  batch 1 (from 0) of epoch 2; its samples in data.train: {listed}\n"
        "  parameters that are not finite (4 of 4): 0.weight, 0.bias, 2.weight, 2.bias"
    )
    assert engine.progress.iteration == 9, "before the optimizer step of the iteration that checks"
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["status"] == "failed"
    assert result["error"] == f"InvalidLossError: {error}"


@pytest.mark.parametrize("interval", [1, 2, 7, 50])
@pytest.mark.parametrize("iteration", [1, 6, 7, 12, 17, 18])
def test_any_iteration_is_found_with_its_samples(interval: int, iteration: int, tmp_path: Path) -> None:
    """Also with an interval longer than an epoch or the run."""
    bad = Poison([iteration])
    hooks = {"check": CheckInvalidLossHook(interval=interval), "sampler_seed": DistSamplerSeedHook(), "poison": bad}
    error = _raised(_engine(tmp_path, hooks))
    assert _place(error) == (iteration, (iteration - 1) % 6, bad.samples[0])


def test_a_run_resumed_within_an_epoch(tmp_path: Path) -> None:
    class Saving(Hook):
        def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Any) -> None:
            if engine.progress.iteration == 8:
                engine.request_checkpoint("saved")

    _engine(tmp_path, {"sampler_seed": DistSamplerSeedHook(), "saving": Saving()}).train()
    hooks = {"check": CheckInvalidLossHook(), "sampler_seed": DistSamplerSeedHook(), "poison": (bad := Poison([10]))}
    error = _raised(_engine(tmp_path, hooks, resume=tmp_path / "checkpoints" / "saved.pth"))
    assert _place(error) == (10, 3, bad.samples[0])


def test_a_checkpoint_hook_that_may_warn_does_not_hide_it(tmp_path: Path) -> None:
    hooks = {"check": CheckInvalidLossHook(interval=15), "checkpoint": CheckpointHook(), "poison": Poison([8])}
    engine = _engine(tmp_path, hooks, on_error={"check": "raise", "checkpoint": "warn", "poison": "raise"})
    error = _raised(engine)
    assert (_place(error)[0], engine.progress.iteration) == (8, 12), "the run ends at the checkpoint"


def test_with_interval_one_the_weights_are_those_before_it(tmp_path: Path) -> None:
    hooks = {"check": CheckInvalidLossHook(interval=1), "poison": Poison([3], math.inf)}
    engine = _engine(tmp_path, hooks)
    error = _raised(engine)
    assert "the loss is nan at iteration 3\n" in str(error)
    norms = {name: parameter.norm().item() for name, parameter in engine.model.named_parameters()}
    largest = max(norms, key=lambda name: norms[name])
    assert f"all parameters are finite; the largest norms: {largest} {norms[largest]:.4g}, " in str(error)


def test_of_another_loader_the_number_of_the_batch(tmp_path: Path) -> None:
    loader = [(torch.randn(2, 3), torch.randn(2, 1)) for _ in range(5)]
    error = _raised(_engine(tmp_path, {"check": CheckInvalidLossHook(), "poison": Poison([4])}, loader=loader))
    assert "batch 3 (from 0) of epoch 1; this loader does not know its samples" in str(error)


def test_accumulated_iterations_count_one_by_one(tmp_path: Path) -> None:
    hooks = {
        "check": CheckInvalidLossHook(interval=2),
        "sampler_seed": DistSamplerSeedHook(),
        "poison": (bad := Poison([8])),
    }
    error = _raised(_engine(tmp_path, hooks, accumulate=3))
    assert _place(error) == (8, 1, bad.samples[0])


def test_one_host_sync_an_interval(tmp_path: Path) -> None:
    def syncs(hooks: dict[str, Hook]) -> int:
        engine = _engine(tmp_path, hooks)
        with HostSyncs() as counted:
            engine.train()
        return counted.count

    at_the_end = 1  # by the engine, also without the hook
    assert syncs({"check": CheckInvalidLossHook(interval=6)}) - syncs({}) == 3 - at_the_end
    assert syncs({"check": CheckInvalidLossHook(interval=5)}) - syncs({}) == 4 - at_the_end


def test_the_error_can_be_sent_to_another_process(tmp_path: Path) -> None:
    error = _raised(_engine(tmp_path, {"check": CheckInvalidLossHook(), "poison": Poison([2])}))
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301  # as launchers do
    assert (type(copy), str(copy)) == (InvalidLossError, str(error))


def test_a_long_batch_is_cut_off_in_the_message(tmp_path: Path) -> None:
    inputs = torch.randn(100, 3)
    loader = build_loader(TensorDataset(inputs, torch.full((100, 1), math.nan)), shuffle=False, batch_size=100)
    error = _raised(_engine(tmp_path, {"check": CheckInvalidLossHook()}, loader=loader))
    assert "samples in data.train: 0, 1, 2, " in str(error)
    assert ", 31, … (100 in all)" in str(error)


# Ranks. --------------------------------------------------------------------------------------------------------------


def on_rank(distributed: Distributed, run_dir: str, interval: int) -> dict[str, Any]:
    """Rank 1 has a NaN at iteration 2, which reaches the weights of all ranks; a long run stops there."""
    bad = Poison([2] if distributed.rank == 1 else [])
    hooks: dict[str, Hook] = {"check": CheckInvalidLossHook(interval=interval), "sampler_seed": DistSamplerSeedHook()}
    hooks["poison"] = bad
    if interval > 10:
        hooks["stop"] = at("after_train_iter", lambda engine: engine.request_stop("told to", agreed=True), nth=2)
    engine = _engine(Path(run_dir), hooks, distributed=distributed)
    try:
        engine.train()
    except Exception as error:
        kind, iteration = type(error).__name__, engine.progress.iteration
        return {
            "type": kind,
            "text": getattr(error, "problem", str(error)),
            "samples": bad.samples,
            "iteration": iteration,
        }
    return {"type": "none"}


@pytest.mark.parametrize(("strategy", "interval"), [("ddp", 1), ("ddp", 3), ("ddp", 50), ("fsdp2", 1)])
def test_one_ranks_nan_ends_all_with_its_error(strategy: str, interval: int, tmp_path: Path) -> None:
    zero, one = on_ranks(2, on_rank, str(tmp_path), interval, strategy=strategy)
    assert (zero["type"], one["type"]) == ("PeerError", "InvalidLossError")
    assert zero["text"] == f"rank 1: {one['text']}"
    assert "the loss is nan at iteration 2" in one["text"]
    assert f"its samples in data.train: {', '.join(map(str, one['samples'][0]))}" in one["text"]
    assert zero["iteration"] == one["iteration"] == (1 if interval == 1 else 2)
    assert "rank 1" in json.loads((tmp_path / "result.json").read_text())["error"]


def in_shards(distributed: Distributed, run_dir: str) -> tuple[dict[str, float], dict[str, float]]:
    """The norms in the error, and those of the whole parameters."""
    engine = _engine(Path(run_dir), {"check": CheckInvalidLossHook(interval=1)}, distributed=distributed)
    whole_norms = {name: whole(value.detach()).norm().item() for name, value in engine.model.named_parameters()}
    return _norms(engine), whole_norms


def test_norms_of_a_model_in_shards_are_those_of_the_whole(tmp_path: Path) -> None:
    for norms, expected in on_ranks(2, in_shards, str(tmp_path), strategy="fsdp2"):
        assert norms == pytest.approx(expected)
