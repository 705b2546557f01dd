"""The optimizers of a resumed run: names and groups, layout of moments, and hyperparameters that were typed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.named_optimizers import OptimizerSet
from hydraloop.engine.run_parts import Settings
from hydraloop.errors import UserError
from hydraloop.hooks.param_scheduler import ParamSchedulerHook
from hydraloop.optim import (
    YOLOX,
    Cosine,
    Function,
    Length,
    Linear,
    Schedule,
    build_schedule,
)
from hydraloop.schemas.engine import FSDPConf
from hydraloop.tasks.task import Task
from tests.config.composed import REPOSITORY
from tests.helpers import at, batches, differences, make_engine, tiny_task
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


def test_a_typed_hyperparameter_takes_effect_and_stays_in_force_in_later_parts_of_the_run(tmp_path: Path) -> None:
    def go_on(iters: int, *lines: str) -> tuple[Any, ...]:
        group = resumed(tmp_path, *lines, iters=iters).optimizer.param_groups[0]
        (tmp_path / "checkpoints" / f"iter_{iters}.pth").rename(tmp_path / "checkpoints" / "iter_2.pth")
        return group["lr"], tuple(group["betas"]), group["weight_decay"]

    trained(tmp_path, "optimizer.lr=1e-2", "optimizer.weight_decay=0.3")
    typed = go_on(4, "optimizer.lr=1e-5", "optimizer.betas=[0.8,0.99]", "++optimizer.eps=1e-8")
    assert typed == (1e-5, (0.8, 0.99), 0.3)
    assert go_on(6) == typed
    assert go_on(8, "optimizer.lr=1e-3") == (1e-3, (0.8, 0.99), 0.3), "the config's own lr"


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
    make_engine(
        run_dir,
        {"note": at("before_train_iter", note, nth=0), "save": save, "param_scheduler": ParamSchedulerHook()},
        train=batches(5),
        task=task,
        optimizer=optimizer,
        schedules=made,
        max_iters=iters,
        **settings,
    ).train()
    return seen


SCHEDULES: dict[str, list[Entry]] = {
    "cosine by epoch": [(Cosine(eta_min=1e-4), {"by_epoch": True})],
    "warm-up before a cosine": [(Linear(0.3), {"end": 3}), (Cosine(eta_min=1e-4), {"begin": 3})],
    "yolox": [(YOLOX(warmup=3, num_last_epochs=2), {})],
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


ONE_CYCLE = (
    "+scheduler.s={_target_: torch.optim.lr_scheduler.OneCycleLR, _partial_: true, max_lr: 0.01, total_steps: 10}"
)


def test_a_command_line_that_is_repeated_changes_nothing_under_a_scheduler_of_torch(tmp_path: Path) -> None:
    """As a queue repeats it. The scheduler has changed the typed numbers since."""
    lines = (ONE_CYCLE, "optimizer.lr=1e-3", "optimizer.betas=[0.8,0.99]")
    whole = trained(tmp_path / "whole", *lines, "engine.max_iters=4")
    trained(tmp_path / "cut", *lines)
    assert list(differences(weights(resumed(tmp_path / "cut", *lines)), weights(whole))) == []


def test_a_checkpoint_without_the_optimizer_goes_on_with_what_was_typed(tmp_path: Path) -> None:
    lines = (*COSINE, "default_hooks.checkpoint.save_optimizer=false")
    trained(tmp_path, *lines, "optimizer.lr=1e-2")
    engine = resumed(tmp_path, *lines, "optimizer.lr=1e-4", "resume_strict=false")
    expected = 1e-4 * (1 + math.cos(math.pi * 3 / 8)) / 2
    assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(expected)


Groups = Sequence[Sequence[str]]
"""Names of the parameters in each group."""

NAMES = ("0.weight", "0.bias", "1.weight", "1.bias")
TWO: dict[str, Groups] = {"hidden": [NAMES[:1]], "rest": [NAMES[1:3], NAMES[3:]]}


def engine_of(
    run_dir: Path,
    groups: Mapping[str, Groups] = TWO,
    *hooks: Hook,
    lrs: Mapping[str, float] | None = None,
    scheduled: bool = False,
    **settings: Any,
) -> Engine:
    """An engine with AdamW, or with several: `hidden` is SGD, others AdamW. It saves `a.pth` at its end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    own = dict(model.named_parameters())
    made: dict[str, torch.optim.Optimizer] = {}
    for name, lists in groups.items():
        values: list[Any] = [{"params": [own[one] for one in names]} for names in lists]
        lr = (lrs or {}).get(name, 0.01)
        made[name] = torch.optim.SGD(values, lr, momentum=0.9) if name == "hidden" else torch.optim.AdamW(values, lr)
    optimizer = made[""] if "" in made else OptimizerSet(made)
    cosine = Schedule("cosine", Cosine(T_max=9), optimizer)
    return make_engine(
        run_dir,
        {
            "param_scheduler": ParamSchedulerHook(),
            "save": at("after_train", lambda engine: engine.request_checkpoint("a")),
            **{f"hook{number}": hook for number, hook in enumerate(hooks)},
        },
        task=Task(model, nn.MSELoss()),
        optimizer=optimizer,
        schedules={"cosine": cosine} if scheduled else {},
        **settings,
    )


def saved(run_dir: Path, groups: Mapping[str, Groups] = TWO, **options: Any) -> Path:
    engine_of(run_dir, groups, **options).train()
    return run_dir / "checkpoints" / "a.pth"


def test_a_checkpoint_names_the_parameters_of_each_group(tmp_path: Path) -> None:
    meta = torch.load(saved(tmp_path), weights_only=True)["meta"]
    assert meta["optimizer"] == {"hidden": "SGD", "rest": "AdamW"}
    assert meta["groups"] == [
        {"optimizer": "hidden", "names": ["0.weight"]},
        {"optimizer": "rest", "names": ["0.bias", "1.weight"]},
        {"optimizer": "rest", "names": ["1.bias"]},
    ]


def test_the_order_of_the_optimizers_in_the_config_does_not_matter(tmp_path: Path) -> None:
    path = saved(tmp_path, lrs={"hidden": 0.1})
    straight, backwards = (
        engine_of(tmp_path / "other", groups, resume=path, max_epochs=2)
        for groups in (TWO, dict(reversed(TWO.items())))
    )
    for engine in (straight, backwards):
        engine.train()
        assert engine.progress.began_at == 2
    assert list(differences(straight.model.state_dict(), backwards.model.state_dict())) == []
    assert [group["lr"] for group in backwards.optimizer.param_groups] == [0.01, 0.01, 0.1]


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ({"": [NAMES[:2], NAMES[2:]]}, {"": [NAMES[:1], NAMES[1:]]}, "optimizer"),
        ({"": [NAMES]}, {"": [(*NAMES[:2], NAMES[3], NAMES[2])]}, "optimizer"),
        (TWO, {"hidden": TWO["hidden"], "rest": [NAMES[1:]]}, "optimizer.rest"),
        (TWO, {"hidden": TWO["hidden"], "other": TWO["rest"]}, "optimizer.other"),
        ({"": [NAMES]}, TWO, "optimizer.hidden"),
    ],
)
def test_other_groups_than_those_of_the_checkpoint_are_refused(
    tmp_path: Path, old: dict[str, Groups], new: dict[str, Groups], key: str
) -> None:
    path = saved(tmp_path, old)
    with pytest.raises(UserError, match="its parameter groups are not those of the checkpoint") as caught:
        engine_of(tmp_path, new, resume=path, max_epochs=2).train()
    assert caught.value.key == key


@pytest.mark.parametrize("strict", [True, False])
def test_another_class_of_one_optimizer_is_refused_or_starts_without_a_state(tmp_path: Path, strict: bool) -> None:
    path = saved(tmp_path)
    states: list[int] = []
    look = at("before_train", lambda engine: states.append(len(engine.optimizer.state)))
    engine = engine_of(tmp_path, TWO, look, resume=path, resume_strict=strict, max_epochs=2)
    engine.run.optimizers["rest"].__class__ = torch.optim.Adam
    if strict:
        with pytest.raises(UserError, match="the optimizer or its parameter groups are not those") as caught:
            engine.train()
        assert caught.value.key == "optimizer.rest"
    else:
        engine.train()
        assert states == [0]


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_typed_hyperparameter_is_that_of_its_optimizer(tmp_path: Path, scheduled: bool) -> None:
    path = saved(tmp_path, scheduled=scheduled)
    typed = {"resume": path, "optimizer_overrides": frozenset({"rest.lr"}), "lrs": {"hidden": 0.5, "rest": 0.02}}
    engine = engine_of(tmp_path, max_epochs=2, scheduled=scheduled, **typed)
    engine.train()
    name = "initial_lr" if scheduled else "lr"
    assert [group[name] for group in engine.optimizer.param_groups] == [0.01, 0.02, 0.02]


# By config. ----------------------------------------------------------------------------------------------------------

BY_CONFIG = (
    "~optimizer",
    "+optimizer@optimizer.hidden=muon",
    "+optimizer@optimizer.rest=adamw",
    "optimizer.hidden.match=@matrix",
    'optimizer.rest.groups=[{match: "@norm|@bias", weight_decay: 0}]',
    "hooks=[ema]",
    "engine.accumulate=2",
    "precision=bf16",
    "data.loader.batch_size=32",
    "engine.max_iters=8",
    "default_hooks.checkpoint.interval=4",
)


def by_config(distributed: Distributed | None, run_dir: str, *lines: str) -> dict[str, Any]:
    """Train, and return what the last checkpoint has of the optimizers, the weights and their average."""
    engine = trained(Path(run_dir), *BY_CONFIG, *lines, distributed=distributed)
    checkpoint = torch.load(engine.checkpoints.last_checkpoint, weights_only=True)  # type: ignore[arg-type]
    return {name: checkpoint[name] for name in ("optimizer", "state_dict", "hooks", "progress")} | {
        name: checkpoint["meta"][name] for name in ("optimizer", "groups")
    }


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_several_by_config_on_two_ranks_end_with_the_same_bits_after_a_cut(tmp_path: Path, strategy: str) -> None:
    """With accumulation, bf16 and an average. The command line is repeated, as a queue does."""
    whole, cut = (str(tmp_path / name) for name in ("whole", "cut"))
    expected = on_ranks(2, by_config, whole, strategy=strategy)[0]
    assert [len(group["names"]) for group in expected["groups"]] == [1, 3, 7]
    on_ranks(2, by_config, cut, "engine.max_iters=4", strategy=strategy)
    found = on_ranks(2, by_config, cut, f"resume={cut}/checkpoints/iter_4.pth", strategy=strategy)[0]
    assert list(differences(found, expected)) == []


def test_what_is_typed_for_one_optimizer_is_read_from_the_command_line(tmp_path: Path) -> None:
    quick = ("engine.accumulate=1", "engine.max_iters=1", "default_hooks.checkpoint.interval=1")
    by_config(None, str(tmp_path), *quick)
    file = tmp_path / "checkpoints" / "iter_1.pth"
    lines = ("optimizer.hidden.lr=0.5", "optimizer.rest={weight_decay: 0.2}")
    by_config(None, str(tmp_path), *quick, f"resume={file}", "engine.max_iters=2", *lines)
    found = torch.load(tmp_path / "checkpoints" / "iter_2.pth", weights_only=True)["optimizer"]
    groups = [*found["hidden"]["param_groups"], *found["rest"]["param_groups"]]
    assert [group["lr"] for group in groups] == [0.5, 0.001, 0.001]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.2, 0]
