"""Schedules of several optimizers: of all, or of one by its name."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, Muon

from hydraloop.engine.loaders import Loaders
from hydraloop.engine.named_optimizers import OptimizerSet
from hydraloop.engine.run_parts import Settings
from hydraloop.errors import UserError
from hydraloop.optim import build_schedules
from tests.optim.scheduled import apply

EXPONENTIAL = {"_target_": "hydraloop.optim.Exponential", "gamma": 0.5}
STEP_LR = {"_target_": "torch.optim.lr_scheduler.StepLR", "_partial_": True, "step_size": 1, "gamma": 0.5}


def _parameter(*shape: int) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(shape))
    parameter.grad = torch.zeros(shape)
    return parameter


def several() -> OptimizerSet:
    hidden = Muon([_parameter(2, 2)], lr=1.0, momentum=0.8)
    rest = AdamW([{"params": [_parameter(2)], "lr": 0.5}, {"params": [_parameter(2)], "lr": 0.25}])
    return OptimizerSet({"hidden": hidden, "rest": rest, "last": Adagrad([_parameter(2)], lr=2.0)})


def made(optimizer: Any, **nodes: Any) -> dict[str, Any]:
    cfg = OmegaConf.create({"scheduler": nodes})
    return dict(build_schedules(cfg, optimizer, Settings(max_epochs=2), Loaders([None] * 5)))


def lrs(optimizer: OptimizerSet) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def test_a_schedule_changes_all_optimizers_or_the_one_that_it_names() -> None:
    optimizer = several()
    schedules = made(optimizer, all=EXPONENTIAL, more={**EXPONENTIAL, "optimizer": "rest", "begin": 1})
    apply(optimizer, list(schedules.values()), 2)
    # `more` continues from the values of `all`: a quarter, and half of it after one step.
    assert lrs(optimizer) == [0.25, 0.5 * 0.25 * 0.5, 0.25 * 0.25 * 0.5, 0.5]
    # A state that is loaded replaces the groups, and a group may be added.
    optimizer.named["hidden"].load_state_dict(optimizer.named["hidden"].state_dict())
    optimizer.named["hidden"].add_param_group({"params": [_parameter(2, 2)]})
    apply(optimizer, list(schedules.values()), 1)
    assert lrs(optimizer) == [0.5, 1.0, 0.25, 0.125, 1.0]


def test_each_group_has_its_own_kind_of_momentum() -> None:
    optimizer = several()
    made_by_name = made(optimizer, warm={**EXPONENTIAL, "param": "momentum"})
    apply(optimizer, list(made_by_name.values()), 1)
    hidden, first, second, last = optimizer.param_groups
    assert hidden["momentum"] == 0.4
    assert first["betas"] == second["betas"] == (0.45, 0.999)
    assert "momentum" not in last


def test_each_optimizer_may_have_a_plateau() -> None:
    optimizer = several()
    plateau = {"_target_": "hydraloop.optim.Plateau", "patience": 0, "monitor": "loss", "mode": "min"}
    schedules = made(
        optimizer, one={**plateau, "optimizer": "rest"}, other={**plateau, "optimizer": "last", "monitor": "score"}
    )
    for loss in (1.0, 2.0):
        for schedule in schedules.values():
            schedule.observe({"loss": loss, "score": 3.0 - loss}, 5, 1)
    apply(optimizer, list(schedules.values()), 5, 1)
    assert lrs(optimizer) == pytest.approx([1.0, 0.05, 0.025, 2.0])


def test_each_optimizer_may_have_a_scheduler_of_torch() -> None:
    optimizer = several()
    schedules = made(
        optimizer,
        one={**STEP_LR, "optimizer": "hidden"},
        other={**STEP_LR, "optimizer": "rest", "gamma": 0.1},
        ours={**EXPONENTIAL, "optimizer": "last"},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.named["hidden"].step()  # the others have `every`: 2, and torch's scheduler must not warn
        for schedule in schedules.values():
            schedule.step()
    apply(optimizer, list(schedules.values()), 1)
    assert lrs(optimizer) == pytest.approx([0.5, 0.05, 0.025, 1.0])


def test_a_scheduler_of_torch_may_change_all() -> None:
    optimizer = several()
    (schedule,) = made(optimizer, all=STEP_LR).values()
    for one in optimizer.named.values():
        one.step()
    schedule.step()
    assert lrs(optimizer) == [0.5, 0.25, 0.125, 1.0]
    fresh = several()
    (again,) = made(fresh, all=STEP_LR).values()
    again.load_state_dict(schedule.state_dict())
    assert lrs(fresh) == lrs(optimizer)


@pytest.mark.parametrize("other", [{}, {"optimizer": "hidden"}])
def test_a_scheduler_of_torch_shares_no_optimizer(other: dict[str, str]) -> None:
    with pytest.raises(UserError, match="another schedule is not possible with a scheduler of torch") as caught:
        made(several(), one={**STEP_LR, "optimizer": "hidden"}, other={**EXPONENTIAL, **other})
    assert caught.value.key == "scheduler.one"


@pytest.mark.parametrize(
    ("optimizer", "param", "key", "text"),
    [
        ("hiden", "lr", "optimizer", "Did you mean hidden?"),
        ("", "lr", "optimizer", "Known: hidden, last, rest."),
        ("last", "momentum", "param", "Adagrad has no 'momentum' in its parameter groups"),
        (None, "momntum", "param", "Did you mean momentum?"),
    ],
)
def test_a_mistake_names_its_key(optimizer: str | None, param: str, key: str, text: str) -> None:
    with pytest.raises(UserError) as caught:
        made(several(), mine={**EXPONENTIAL, "optimizer": optimizer, "param": param})
    assert caught.value.key == f"scheduler.mine.{key}"
    assert text in str(caught.value)


def test_one_optimizer_has_no_name() -> None:
    with pytest.raises(UserError) as caught:
        made(SGD([_parameter(2)], lr=1.0), mine={**EXPONENTIAL, "optimizer": "sgd"})
    assert caught.value.key == "scheduler.mine.optimizer"
    assert "set scheduler.mine.optimizer=null" in str(caught.value.remedy)
