"""Several optimizers and their parameter groups in checkpoints: saved, given back by name, refused if they changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.named_optimizers import OptimizerSet
from hydraloop.engine.run import Settings
from hydraloop.errors import UserError
from hydraloop.hooks.param_scheduler import ParamSchedulerHook
from hydraloop.optim import Cosine, Schedule
from hydraloop.tasks.task import Task
from tests.engine.checkpoint.test_optimizer_state import trained
from tests.helpers import EngineWithNeededHooks, at, batches, differences
from tests.ranks import on_ranks

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
    return EngineWithNeededHooks(
        task=Task(model, nn.MSELoss()),
        optimizer=optimizer,
        loaders=Loaders(batches(2)),
        hooks={
            "param_scheduler": ParamSchedulerHook(),
            "save": at("after_train", lambda engine: engine.request_checkpoint("a")),
            **{f"hook{number}": hook for number, hook in enumerate(hooks)},
        },
        schedules={"cosine": cosine} if scheduled else {},
        settings=Settings(**{"device": "cpu", "max_epochs": 1, **settings}),
        run_dir=run_dir,
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
