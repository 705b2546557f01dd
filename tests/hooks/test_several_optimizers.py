"""The training hooks with several optimizers and several parameter groups, on real runs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.named_optimizers import OptimizerSet
from hydraloop.files.metrics_log import FILENAME
from hydraloop.hooks import CheckInvalidLossHook, CheckpointHook, EMAHook, FreezeHook
from hydraloop.hooks.check_invalid_loss import InvalidLossError
from hydraloop.hooks.grad_clip import GradClipHook
from hydraloop.hooks.logger import LoggerHook
from hydraloop.hooks.param_scheduler import ParamSchedulerHook
from hydraloop.hooks.runtime_info import RuntimeInfoHook
from hydraloop.hooks.trackers import TensorBoardLoggerHook
from hydraloop.optim import Exponential, Schedule
from hydraloop.tasks.task import Task
from tests.helpers import at, logged, summary
from tests.hooks.tiny_runs import batches, bits, engine_of, model, same

HALF = Exponential(0.5)


def hooks_of_a_record(**more: Hook) -> dict[str, Hook]:
    return {
        "runtime_info": RuntimeInfoHook(),
        **more,
        "logger": LoggerHook(interval=1),
        "param_scheduler": ParamSchedulerHook(),
    }


def trained(run_dir: Path, net: nn.Module, optimizer: optim.Optimizer, schedules: Any = None, **options: Any) -> Any:
    """The records of a training of four iterations."""
    hooks = hooks_of_a_record(**options.pop("hooks", {}))
    settings = {"max_epochs": 1, "val": False, **options}
    engine_of(run_dir, hooks, net=net, optimizer=optimizer, schedules=schedules, **settings).train()
    return [record for record in logged(run_dir / FILENAME) if record["mode"] == "train"]


def lrs(record: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in record.items() if name.startswith("lr")}


def two(net: nn.Module) -> OptimizerSet:
    """SGD for the first layer, AdamW with two groups for the rest."""
    first, norm, _, last = net.children()
    rest = [{"params": [*last.parameters()]}, {"params": [*norm.parameters()], "lr": 0.25, "weight_decay": 0.0}]
    return OptimizerSet({"first": optim.SGD(first.parameters(), lr=1.0), "rest": optim.AdamW(rest, lr=1.0)})


def test_the_record_has_the_lr_of_each_group(tmp_path: Path) -> None:
    net = model()
    first, norm, _, last = net.children()
    groups: list[dict[str, Any]] = [
        {"params": [*layer.parameters()], "lr": lr} for layer, lr in ((first, 4.0), (norm, 4.0), (last, 1.0))
    ]
    groups[2]["name"] = "head"
    optimizer = optim.SGD(groups, lr=1.0)
    records = trained(tmp_path, net, optimizer, {"half": Schedule("half", HALF, optimizer)})
    assert [lrs(record) for record in records[:2]] == [
        {"lr": 4.0, "lr/1": 4.0, "lr/head": 1.0},
        {"lr": 2.0, "lr/1": 2.0, "lr/head": 0.5},
    ]


def test_each_further_optimizer_is_in_the_record(tmp_path: Path) -> None:
    net = model()
    optimizer = two(net)
    schedules = {
        "all": Schedule("all", HALF, optimizer, begin=2),
        "rest": Schedule("rest", HALF, optimizer.named["rest"]),
    }
    records = trained(tmp_path, net, optimizer, schedules)
    assert [lrs(record) for record in records] == [
        {"lr": 1.0, "lr/rest": 1.0, "lr/rest.1": 0.25},
        {"lr": 1.0, "lr/rest": 0.5, "lr/rest.1": 0.125},
        {"lr": 1.0, "lr/rest": 0.25, "lr/rest.1": 0.0625},
        {"lr": 0.5, "lr/rest": 0.0625, "lr/rest.1": 0.015625},
    ]


# A task with steps. --------------------------------------------------------------------------------------------------


class TwoSteps(Task):
    """The mean squared error, in the second step twice; it may be infinite or NaN there."""

    steps = ("first", "last")
    factors: Mapping[int, float] = {}
    """Of the loss of the second step, by iteration from 1."""

    def forward(self, batch: Any, step: str | None = None) -> dict[str, Any]:
        """Return the loss of a step, and a number."""
        loss = super().forward(batch)["loss"]
        if step == "last":
            loss = loss * self.factors.get(self.engine.progress.iteration + 1, 2.0)
        return {"loss": loss, "score": loss.detach() + 1}


class Norms(Hook):
    """The norms of the gradients of each step, before or after clipping."""

    def __init__(self, priority: int) -> None:
        self.priority = priority  # type: ignore[misc]
        self.seen: list[tuple[int, str, float]] = []

    def before_optimizer_step(self, engine: Engine, batch_idx: int, batch: Any, outputs: Any) -> None:
        gradients = [
            p.grad for group in engine.stepper.optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        self.seen.append(
            (engine.progress.iteration + 1, engine.stepper.task_step, float(nn.utils.get_total_norm(gradients)))
        )


def with_steps(run_dir: Path, hooks: Mapping[str, Hook], *, schedules: Any = (), **options: Any) -> Engine:
    """An engine for six iterations in two epochs; the last layer has another optimizer with two groups."""
    net = model()
    optimizer = OptimizerSet(
        {
            "first": optim.SGD([*net[0].parameters(), *net[1].parameters()], lr=0.1),
            "last": optim.AdamW([{"params": [net[3].weight]}, {"params": [net[3].bias], "lr": 0.02}], lr=0.01),
        }
    )
    task = TwoSteps(net, nn.functional.mse_loss)
    task.factors = options.pop("factors", {})
    return engine_of(
        run_dir,
        hooks,
        task=task,
        optimizer=optimizer,  # type: ignore[arg-type]
        loaders=Loaders(batches(3)),
        schedules={name: Schedule(name, HALF, optimizer.named[name]) for name in schedules},
        **{"max_epochs": 2, **options},
    )


def test_each_step_is_clipped_recorded_and_scheduled_by_itself(tmp_path: Path) -> None:
    before, after = Norms(30), Norms(45)
    clip = GradClipHook(max_norm=0.1)
    hooks = hooks_of_a_record(before=before, grad_clip=clip, after=after, ema=EMAHook())
    engine = with_steps(tmp_path, hooks, schedules=("last",), every={"last": 2})
    engine.train()
    records = logged(tmp_path / FILENAME)
    found = [
        (record["iteration"], step, record[f"{step}/grad_norm"])
        for record in records
        for step in TwoSteps.steps
        if f"{step}/grad_norm" in record
    ]
    assert found == [(iteration, step, pytest.approx(norm)) for iteration, step, norm in before.seen]
    assert [iteration for iteration, step, _ in found if step == "last"] == [2, 4, 6]
    assert all(norm == pytest.approx(0.1, rel=1e-4) for _, _, norm in after.seen)
    assert "grad_norm" not in records[0]
    # All schedules count iterations in which any optimizer stepped.
    assert [(record["lr"], record["lr/last"], record["lr/last.1"]) for record in records] == [
        (0.1, 0.01 / 2**n, 0.02 / 2**n) for n in range(6)
    ]
    for record in records:
        losses = [record[f"{step}/loss"] for step in TwoSteps.steps if f"{step}/loss" in record]
        assert record["loss"] == pytest.approx(sum(losses))
        assert record["first/score"] == pytest.approx(losses[0] + 1)
    assert engine.progress.optimizer_step == engine.hooks["ema"].updates == 6  # type: ignore[attr-defined]


def test_a_run_with_steps_and_schedules_resumes_to_the_same_bits(tmp_path: Path) -> None:
    def run(run_dir: Path, **options: Any) -> Engine:
        saving = CheckpointHook(interval=3, by_epoch=False)
        hooks = hooks_of_a_record(grad_clip=GradClipHook(max_norm=0.1), ema=EMAHook(), checkpoint=saving)
        engine = with_steps(run_dir, hooks, schedules=("last", "first"), every={"last": 2}, **options)
        engine.train()
        return engine

    whole = run(tmp_path / "whole")
    resumed = run(tmp_path / "resumed", resume=tmp_path / "whole" / "checkpoints" / "iter_3.pth")
    assert resumed.progress.began_at == 3
    assert same(bits(resumed.model), bits(whole.model))
    records = [[lrs(record) for record in logged(tmp_path / name / FILENAME)] for name in ("whole", "resumed")]
    assert records[0][3:] == records[1]
    assert "lr          first 0.1 at iteration 0, 0.00156 at iteration 6\n" in summary(whole)


def test_an_invalid_loss_names_its_step_and_stops_before_it(tmp_path: Path) -> None:
    engine = with_steps(tmp_path, {"check": CheckInvalidLossHook(interval=1)}, factors={3: math.nan})
    with pytest.raises(InvalidLossError, match="the loss of the step last is nan at iteration 3\n"):
        engine.train()
    assert all(parameter.isfinite().all() for parameter in engine.model.parameters())


def test_a_frozen_group_keeps_its_values_in_each_step(tmp_path: Path) -> None:
    begun = bits(model())
    seen: list[set[str]] = []

    def look(engine: Engine) -> None:
        now = engine.model.state_dict()
        seen.append({name for name, value in begun.items() if torch.equal(now[name], value)})

    hooks = {
        "freeze": FreezeHook(modules=["0"], iters=3),
        "rest": FreezeHook(modules=["3.bias"]),
        "look": at("after_train_iter", look, nth=0),
    }
    with_steps(tmp_path, hooks).train()
    layers = {"0.weight", "3.weight", "3.bias"}
    assert [frozen & layers for frozen in seen] == [{"0.weight", "3.bias"}] * 3 + [{"3.bias"}] * 3


class Counting(TensorBoardLoggerHook):
    """Writes the counts, without a process that reads them."""

    def _begin(self, engine: Engine) -> None:
        self._begun = True


def test_histograms_have_the_gradients_of_all_steps(tmp_path: Path) -> None:
    engine = with_steps(tmp_path, {"logger": LoggerHook(), "tensorboard": Counting(histograms=2)}, max_iters=2)
    engine.train()
    found = json.loads((tmp_path / "media" / "train" / "parameters_iter_2.json").read_text())
    names = [name for name, _ in engine.model.named_parameters()]
    assert found.keys() == {f"{kind}/{name}" for kind in ("weights", "gradients") for name in names}


def test_several_optimizers_share_one_norm(tmp_path: Path) -> None:
    net, norms = model(), Norms(30)
    records = trained(tmp_path, net, two(net), hooks={"norms": norms, "grad_clip": GradClipHook(max_norm=0.1)})
    assert [record["grad_norm"] for record in records] == pytest.approx([norm for _, _, norm in norms.seen])
    assert min(norm for _, _, norm in norms.seen) > 0.1
