"""The training hooks with several optimizers and several parameter groups, on real runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.stepping.several import Several
from hydraloop.hooks.grad_clip import GradClipHook
from hydraloop.hooks.logger import LoggerHook
from hydraloop.hooks.param_scheduler import ParamSchedulerHook
from hydraloop.hooks.runtime_info import RuntimeInfoHook
from hydraloop.optim import OneCycle, Schedule, Step
from hydraloop.run.record_log import FILENAME
from tests.helpers import logged
from tests.hooks.tiny_runs import engine_of, model

HALF = Step(1, gamma=0.5)


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


def two(net: nn.Module) -> Several:
    """SGD for the first layer, AdamW with two groups for the rest."""
    first, norm, _, last = net.children()
    rest = [{"params": [*last.parameters()]}, {"params": [*norm.parameters()], "lr": 0.25, "weight_decay": 0.0}]
    return Several({"first": optim.SGD(first.parameters(), lr=1.0), "rest": optim.AdamW(rest, lr=1.0)})


def test_the_record_has_the_lr_of_each_group_whose_lr_differs(tmp_path: Path) -> None:
    net = model()
    groups = [
        {"params": [parameter], "lr": lr} for parameter, lr in zip(net.parameters(), [4, 4, 2, 2, 4, 1], strict=True)
    ]
    groups[5]["name"] = "head"
    optimizer = optim.SGD(groups, lr=1.0)
    records = trained(tmp_path, net, optimizer, {"half": Schedule("half", HALF, optimizer)})
    assert [lrs(record) for record in records[:2]] == [
        {"lr": 4.0, "lr/2": 2.0, "lr/head": 1.0},
        {"lr": 2.0, "lr/2": 1.0, "lr/head": 0.5},
    ]


def test_with_one_lr_the_record_has_one(tmp_path: Path) -> None:
    net = model()
    groups = [{"params": [parameter], "weight_decay": 0.1 * n} for n, parameter in enumerate(net.parameters())]
    assert lrs(trained(tmp_path, net, optim.SGD(groups, lr=1.0))[-1]) == {"lr": 1.0}


def test_a_group_whose_schedule_differs_is_recorded_from_then_on(tmp_path: Path) -> None:
    net = model()
    optimizer = optim.SGD([{"params": [parameter]} for parameter in net.parameters()], lr=1.0)
    tops = OneCycle(max_lr=[1.0, 1.0, 1.0, 3.0, 1.0, 1.0], div_factor=1.0, cycle_momentum=False)
    records = trained(tmp_path, net, optimizer, {"cycle": Schedule("cycle", tops, optimizer, end=4)})
    assert all(set(lrs(record)) == {"lr", "lr/3"} for record in records)
    assert lrs(records[0]) == {"lr": 1.0, "lr/3": 3.0}


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


def test_several_optimizers_share_one_norm(tmp_path: Path) -> None:
    class Norms(Hook):
        priority = 30

        def __init__(self) -> None:
            self.seen: list[float] = []

        def before_optimizer_step(self, engine: Engine, batch_idx: int, batch: Any, outputs: Any) -> None:
            self.seen.append(float(nn.utils.get_total_norm([p.grad for p in engine.model.parameters()])))

    net, norms = model(), Norms()
    records = trained(tmp_path, net, two(net), hooks={"norms": norms, "grad_clip": GradClipHook(max_norm=0.1)})
    assert [record["grad_norm"] for record in records] == pytest.approx(norms.seen)
    assert torch.tensor(norms.seen).min() > 0.1
