"""The optimizer of a resumed run: layout of its moments, its implementation, and hyperparameters that were typed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hydraloop
from hydraloop import build
from hydraloop.engine.checkpoint.shards import with_replaced
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.distributed.fsdp import local, whole
from hydraloop.engine.engine import Engine
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.named_optimizers import OptimizerSet
from hydraloop.engine.run import Settings
from hydraloop.hooks.param_scheduler import ParamSchedulerHook
from hydraloop.optim import (
    YOLOX,
    Cosine,
    Function,
    Length,
    Linear,
    build_schedule,
)
from hydraloop.schemas.engine import FSDPConf
from hydraloop.tasks.task import Task
from tests.config.composed import REPOSITORY
from tests.helpers import EngineWithNeededHooks, at, batches, differences, tiny_task
from tests.marks import nightly, slow
from tests.ranks import on_ranks

QUICK = (
    "engine.device=cpu",
    "engine.max_iters=2",
    "engine.val_interval=null",
    "engine.test=false",
    "scheduler=[]",
    "default_hooks=[param_scheduler,checkpoint]",
    "default_hooks.checkpoint.by_epoch=false",
    "default_hooks.checkpoint.interval=2",
)
ADAMW = ("optimizer.fused=true", "optimizer.eps=1e-3", "optimizer.lr=0.01")
"""With a large eps, rounding in a gradient near 0 stays rounding in the step."""


def trained(run_dir: Path, *lines: str, distributed: Distributed | None = None) -> Engine:
    """An engine that has trained two iterations, or from a checkpoint to `engine.max_iters`."""
    engine = build(hydraloop.compose([*QUICK, *lines], folder=REPOSITORY), run_dir=run_dir, distributed=distributed)
    engine.train()
    return engine


def resumed(run_dir: Path, *lines: str, iters: int = 4, **options: Any) -> Engine:
    """An engine that went on from the checkpoint after two iterations."""
    file = run_dir / "checkpoints" / "iter_2.pth"
    return trained(run_dir, f"resume={file}", f"engine.max_iters={iters}", *lines, **options)


def weights(engine: Engine) -> dict[str, Tensor]:
    """The model's, whole."""
    return {name: whole(value).cpu() for name, value in engine.model.state_dict().items()}


# Layout and implementation. ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [True, slow(False)])
def test_channels_last_may_be_switched_between_two_parts_of_a_run(tmp_path: Path, first: bool) -> None:
    whole = trained(tmp_path / "whole", *ADAMW, "engine.channels_last=false", "engine.max_iters=4")
    trained(tmp_path / "parts", *ADAMW, f"engine.channels_last={first}")
    engine = resumed(tmp_path / "parts", *ADAMW, f"engine.channels_last={not first}")
    for parameter, state in engine.optimizer.state.items():
        assert state["exp_avg"].stride() == state["exp_avg_sq"].stride() == parameter.stride()
    for name, value in weights(engine).items():
        torch.testing.assert_close(value, weights(whole)[name], rtol=1e-4, atol=1e-5, msg=name)


def on_a_rank(distributed: Distributed, run_dir: str, resume: bool, *lines: str) -> list[str]:
    """Train, or resume, and name the moments whose layout is not that of their parameter."""
    start = resumed if resume else trained
    engine = start(Path(run_dir), "data.loader.batch_size=32", *lines, distributed=distributed)
    return [
        f"{name} of {list(parameter.shape)}"
        for parameter, state in engine.optimizer.state.items()
        for name, value in state.items()
        if value.shape == parameter.shape and local(value).stride() != local(parameter).stride()
    ]


@pytest.mark.slow
def test_a_channels_last_checkpoint_goes_on_in_shards(tmp_path: Path) -> None:
    trained(tmp_path, *ADAMW, "engine.channels_last=true")
    assert on_ranks(2, on_a_rank, str(tmp_path), True, *ADAMW, strategy="fsdp2") == [[], []]


@pytest.mark.slow
def test_sgd_that_was_fused_in_one_process_goes_on_in_shards(tmp_path: Path) -> None:
    """torch has no fused SGD for tensors in shards."""
    engine = trained(tmp_path, "optimizer=sgd", "optimizer.fused=true")
    assert engine.optimizer.param_groups[0]["fused"]
    assert on_ranks(2, on_a_rank, str(tmp_path), True, "optimizer=sgd", strategy="fsdp2") == [[], []]


@pytest.mark.parametrize("fused", ["true", "false"])
def test_the_implementation_is_that_of_the_config(tmp_path: Path, fused: str) -> None:
    trained(tmp_path, f"optimizer.fused={'false' if fused == 'true' else 'true'}")
    assert resumed(tmp_path, f"optimizer.fused={fused}").optimizer.param_groups[0]["fused"] is (fused == "true")


# Types. --------------------------------------------------------------------------------------------------------------


class Half(nn.Linear):
    """A layer in bfloat16."""


class Mixed(nn.Module):
    """A layer in bfloat16 and one in float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Half(3, 4, dtype=torch.bfloat16), nn.Linear(4, 1)

    def forward(self, batch: Tensor) -> Tensor:
        hidden: Tensor = self.first(batch.to(torch.bfloat16)).float()
        out: Tensor = self.second(hidden)
        return out


class Odd(torch.optim.Optimizer):
    """Keeps states in other types than their parameters, also in lists and dicts, and computes with all of them."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["master"] = parameter.float() / 3
                    state["momentum"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                    state["codes"] = torch.zeros_like(parameter, dtype=torch.uint8)
                    state["step"] = torch.zeros((), dtype=torch.int64)
                    state["nested"] = {"pair": [parameter.double() / 7, torch.ones(2, dtype=torch.float16) / 3]}
                state["step"] += 1
                state["codes"] += 1
                state["momentum"].mul_(0.9).add_(parameter.grad)
                exact, short = state["nested"]["pair"]
                exact.mul_(0.7).add_(state["momentum"]).div_(1 + short[1].item() + state["step"].item())
                state["master"].add_(exact, alpha=-group["lr"]).sub_(state["codes"], alpha=1e-3)
                parameter.copy_(state["master"])


class OddInItsOwnWay(Odd):
    """Has its own form of a state dict, and changes what it loads."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "version": 2}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict.pop("version") == 2
        super().load_state_dict(state_dict)


def all_kinds(model: Mixed) -> OptimizerSet:
    """Optimizers of torch and others; a fused one, whose step count is on the device of the parameters."""
    named = dict(model.named_parameters())
    nadam = torch.optim.NAdam([named["first.weight"]], lr=0.1)
    adamw = torch.optim.AdamW([named["second.weight"]], lr=0.1, fused=True)
    return OptimizerSet({"nadam": nadam, "adamw": adamw, "odd": Odd([named["first.bias"], named["second.bias"]])})


def of_engine(
    distributed: Distributed | None, run_dir: Path, kind: Callable[[Any], Any], resume: Path | None = None
) -> dict[str, Any]:
    """Train two epochs, or the second one; return the weights and the states of the optimizers as text."""
    model = Mixed()
    if distributed is not None:
        distributed.prepare(model)
    engine = Engine(
        task=Task(model, nn.MSELoss()),
        optimizer=kind(model) if kind is all_kinds else kind(model.parameters()),
        loaders=Loaders(batches(3)),
        hooks={"save": at("after_train_epoch", lambda engine: engine.request_checkpoint(f"{engine.progress.epoch}"))},
        settings=Settings(device="cpu", max_epochs=2, resume=resume),
        run_dir=run_dir,
        distributed=distributed,
    )
    engine.train()
    found = {"weights": engine.model.state_dict(), "optimizer": engine.optimizer.state_dict()}
    shown: dict[str, Any] = with_replaced(
        found, lambda value, path: text(value) if isinstance(value, Tensor) else value
    )
    return shown


def text(value: Tensor) -> str:
    return f"{value.dtype} {local(value).device} {local(value).tolist()}"


@pytest.mark.parametrize("kind", [Odd, OddInItsOwnWay, all_kinds])
def test_each_state_comes_back_in_its_own_type(kind: Callable[[Any], Any], tmp_path: Path) -> None:
    whole = of_engine(None, tmp_path, kind)
    assert of_engine(None, tmp_path, kind, tmp_path / "checkpoints" / "1.pth") == whole


@pytest.mark.parametrize("strategy", ["ddp", slow("fsdp2")])
def test_each_state_comes_back_in_its_own_type_on_each_rank(strategy: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"strategy": strategy, "fsdp": FSDPConf(wrap=["Half"])}
    whole = on_ranks(2, of_engine, tmp_path, Odd, **options)
    assert on_ranks(2, of_engine, tmp_path, Odd, tmp_path / "checkpoints" / "1.pth", **options) == whole


# Hyperparameters. ----------------------------------------------------------------------------------------------------


def test_a_typed_hyperparameter_takes_effect_and_the_others_stay(tmp_path: Path) -> None:
    trained(tmp_path, "optimizer.lr=1e-2", "optimizer.weight_decay=0.3")
    engine = resumed(tmp_path, "optimizer.lr=1e-5", "optimizer.betas=[0.8,0.99]", "++optimizer.eps=1e-8")
    group = engine.optimizer.param_groups[0]
    assert (group["lr"], tuple(group["betas"]), group["weight_decay"]) == (1e-5, (0.8, 0.99), 0.3)


def test_what_was_typed_stays_in_force_in_later_parts_of_the_run(tmp_path: Path) -> None:
    trained(tmp_path)
    resumed(tmp_path, "optimizer.lr=1e-5")
    (tmp_path / "checkpoints" / "iter_4.pth").rename(tmp_path / "checkpoints" / "iter_2.pth")
    engine = resumed(tmp_path, iters=6)
    assert engine.optimizer.param_groups[0]["lr"] == 1e-5
    (tmp_path / "checkpoints" / "iter_6.pth").rename(tmp_path / "checkpoints" / "iter_2.pth")
    assert resumed(tmp_path, "optimizer.lr=1e-3", iters=8).optimizer.param_groups[0]["lr"] == 1e-3  # the config's own


COSINE = ("scheduler=[cosine]", "scheduler.cosine.T_max=8")


def test_betas_under_a_schedule(tmp_path: Path) -> None:
    schedule = (*COSINE, "scheduler.cosine.param=momentum")
    trained(tmp_path, *schedule)
    group = resumed(tmp_path, *schedule, "optimizer.betas=[0.5,0.99]").optimizer.param_groups[0]
    assert tuple(group["betas"]) == pytest.approx((0.5 * (1 + math.cos(math.pi * 3 / 8)) / 2, 0.99))


Entry = tuple[Function, dict[str, Any]]
"""A function of the step, and when it acts."""


def scheduled(run_dir: Path, lr: float, iters: int, schedules: Sequence[Entry], **settings: Any) -> list[list[float]]:
    """The lrs of both groups in each iteration of a run of 10, stopped after `iters`."""
    seen: list[list[float]] = []

    def note(engine: Engine) -> None:
        seen.append([group["lr"] for group in engine.optimizer.param_groups])

    task = tiny_task()
    groups = [{"params": [task.model.weight], "lr": lr}, {"params": [task.model.bias], "lr": lr * 10}]
    optimizer = torch.optim.SGD(groups, lr=lr)
    made: dict[str, Any] = {
        name: build_schedule(name, function, optimizer, Length(2, 10, 5), **ours)
        for name, (function, ours) in zip(("first", "second"), schedules, strict=False)
    }
    save = at("after_train", lambda engine: engine.request_checkpoint("a"))
    EngineWithNeededHooks(
        task=task,
        optimizer=optimizer,
        loaders=Loaders(batches(5)),
        hooks={"note": at("before_train_iter", note, nth=0), "save": save, "param_scheduler": ParamSchedulerHook()},
        schedules=made,
        settings=Settings(device="cpu", max_iters=iters, **settings),
        run_dir=run_dir,
    ).train()
    return seen


SCHEDULES: dict[str, list[Entry]] = {
    "cosine by epoch": [(Cosine(eta_min=1e-4), {"by_epoch": True})],
    "warm-up before a cosine": [(Linear(0.3), {"end": 3}), (Cosine(eta_min=1e-4), {"begin": 3})],
    "yolox": [(YOLOX(warmup_iters=3, num_last_epochs=2), {})],
    "two that overlap": [(Linear(0.3, total_iters=6), {}), (Cosine(eta_min=1e-4), {})],
}


@pytest.mark.parametrize(
    ("cut", "new"),
    [
        nightly(1, 2e-4),
        (4, 1e-2),  # within an epoch
        (5, 2e-4),  # at the end of one
        nightly(8, 1e-2),
    ],
)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_typed_lr_goes_on_as_in_a_run_that_had_it_from_the_beginning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, cut: int, new: float
) -> None:
    schedules = SCHEDULES[name]
    expected = scheduled(tmp_path / "whole", new, 10, schedules)
    scheduled(tmp_path, 1e-3, cut, schedules)
    typed = {"resume": tmp_path / "checkpoints" / "a.pth", "optimizer_overrides": frozenset({"lr"})}
    found = scheduled(tmp_path, new, 10, schedules, **typed)
    assert len(found) == 10 - cut
    assert found == expected[cut:]
    assert "scheduler." not in caplog.text


AD_HOC = "+scheduler.s={{_target_: torch.optim.lr_scheduler.{}, _partial_: true, {}}}"


@pytest.mark.parametrize(
    "schedule",
    [
        AD_HOC.format("OneCycleLR", "max_lr: 0.01, total_steps: 10"),
        AD_HOC.format("CyclicLR", "base_lr: 0.001, max_lr: 0.01, cycle_momentum: false"),
    ],
)
def test_a_command_line_that_is_repeated_changes_nothing_under_a_scheduler_of_torch(
    tmp_path: Path, schedule: str
) -> None:
    """As a queue repeats it. The scheduler has changed the typed numbers since."""
    lines = (schedule, "optimizer.lr=1e-3", "optimizer.betas=[0.8,0.99]")
    whole = trained(tmp_path / "whole", *lines, "engine.max_iters=4")
    trained(tmp_path / "cut", *lines)
    assert list(differences(weights(resumed(tmp_path / "cut", *lines)), weights(whole))) == []


def test_a_checkpoint_without_the_optimizer_goes_on_with_what_was_typed(tmp_path: Path) -> None:
    lines = (*COSINE, "default_hooks.checkpoint.save_optimizer=false")
    trained(tmp_path, *lines, "optimizer.lr=1e-2")
    engine = resumed(tmp_path, *lines, "optimizer.lr=1e-4", "resume_strict=false")
    expected = 1e-4 * (1 + math.cos(math.pi * 3 / 8)) / 2
    assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(expected)
