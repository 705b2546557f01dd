"""Schedules: torch's values, when they step, and what is saved of them."""

from __future__ import annotations

import functools
import io
import math
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as torch_schedulers

from hydraloop.errors import UserError
from hydraloop.optim import Schedule, build_schedule

STEPS, EPOCHS = 20, 4


def sgd(lr: float = 1.0) -> SGD:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    return SGD([parameter], lr=lr, momentum=0.9)


def make(
    name: str, optimizer: Optimizer, target: Any, *, when: dict[str, Any] | None = None, **arguments: Any
) -> Schedule:
    return build_schedule(
        name,
        functools.partial(target, **arguments),
        optimizer,
        **(when or {}),
        steps_per_epoch=STEPS // EPOCHS,
        total_epochs=EPOCHS,
        total_steps=STEPS,
    )


def rates(optimizer: Optimizer, schedules: list[Schedule], first: int = 1, last: int = STEPS) -> list[float]:
    """The learning rate of step `first` and, with schedules stepped after each, of those up to `last + 1`."""
    seen = [optimizer.param_groups[0]["lr"]]
    for n in range(first, last + 1):
        optimizer.step()
        for schedule in schedules:
            schedule.step(n)
        seen.append(optimizer.param_groups[0]["lr"])
    return seen


def torchs_rates(target: Any, steps: int = STEPS, **arguments: Any) -> list[float]:
    optimizer = sgd()
    scheduler = target(optimizer, **arguments)
    seen = [optimizer.param_groups[0]["lr"]]
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        seen.append(optimizer.param_groups[0]["lr"])
    return seen


@pytest.mark.parametrize(
    ("name", "open_arguments", "full_arguments"),
    [
        ("CosineAnnealingLR", {"T_max": None}, {"T_max": STEPS}),
        ("CosineAnnealingLR", {}, {"T_max": STEPS}),
        ("CosineAnnealingLR", {"T_max": 7, "eta_min": 0.1}, {"T_max": 7, "eta_min": 0.1}),
        ("LinearLR", {"total_iters": None}, {"total_iters": STEPS}),
        ("LinearLR", {}, {}),
        ("PolynomialLR", {"total_iters": None, "power": 2.0}, {"total_iters": STEPS, "power": 2.0}),
        ("OneCycleLR", {"max_lr": 2.0, "total_steps": None}, {"max_lr": 2.0, "total_steps": STEPS}),
        (
            "OneCycleLR",
            {"max_lr": 2.0, "epochs": EPOCHS, "steps_per_epoch": None},
            {"max_lr": 2.0, "epochs": EPOCHS, "steps_per_epoch": STEPS // EPOCHS},
        ),
        ("MultiStepLR", {"milestones": [3, 9]}, {"milestones": [3, 9]}),
        ("ExponentialLR", {"gamma": 0.8}, {"gamma": 0.8}),
        ("CosineAnnealingWarmRestarts", {"T_0": 6}, {"T_0": 6}),
    ],
)
def test_torchs_schedulers_give_torchs_values(
    name: str, open_arguments: dict[str, Any], full_arguments: dict[str, Any]
) -> None:
    target = getattr(torch_schedulers, name)
    # OneCycleLR has a value for each of its total_steps, and refuses one more.
    steps = STEPS - 1 if name == "OneCycleLR" else STEPS
    optimizer = sgd()
    schedule = make("it", optimizer, target, **open_arguments)
    assert rates(optimizer, [schedule], last=steps) == torchs_rates(target, steps, **full_arguments)


def test_a_cosine_over_the_training_ends_at_its_lowest() -> None:
    optimizer = sgd()
    seen = rates(optimizer, [make("cosine", optimizer, torch_schedulers.CosineAnnealingLR, eta_min=0.25)])
    assert seen[0] == 1.0
    assert seen[STEPS // 2] == pytest.approx(0.625)
    assert seen[-1] == pytest.approx(0.25)


def test_the_horizon_by_epoch_counts_epochs() -> None:
    optimizer = sgd()
    schedule = make("cosine", optimizer, torch_schedulers.CosineAnnealingLR, when={"by_epoch": True})
    assert schedule.by_epoch
    assert rates(optimizer, [schedule], last=EPOCHS) == torchs_rates(
        torch_schedulers.CosineAnnealingLR, EPOCHS, T_max=EPOCHS
    )


@pytest.mark.parametrize("reverse", [False, True])
def test_a_warm_up_and_a_cosine_join_without_a_gap(reverse: bool) -> None:
    optimizer = sgd()
    schedules = [
        make("linear", optimizer, torch_schedulers.LinearLR, when={"end": 5}, start_factor=0.5, total_iters=None),
        make("cosine", optimizer, torch_schedulers.CosineAnnealingLR, when={"begin": 5}, T_max=None),
    ]
    seen = rates(optimizer, schedules[::-1] if reverse else schedules)
    expected = [0.5 + 0.1 * n for n in range(5)] + [0.5 + 0.5 * math.cos(math.pi * n / 15) for n in range(16)]
    # Reversed, the cosine takes its first value before the warm-up has its last; it is scaled with it, so the same.
    assert seen == pytest.approx(expected, abs=1e-9)


def test_nothing_happens_before_begin_and_after_end() -> None:
    optimizer = sgd()
    schedule = make("exponential", optimizer, torch_schedulers.ExponentialLR, when={"begin": 4, "end": 6}, gamma=0.5)
    assert schedule.scheduler is None
    assert rates(optimizer, [schedule]) == [1.0] * 5 + [0.5] + [0.25] * 15


def test_building_a_later_schedule_leaves_no_trace_in_the_optimizer() -> None:
    optimizer = sgd()
    before = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    make("late", optimizer, torch_schedulers.OneCycleLR, when={"begin": 4}, max_lr=9.0, total_steps=None)
    assert {name: value for name, value in optimizer.param_groups[0].items() if name != "params"} == before


def test_a_begin_behind_the_end_of_a_short_run_never_begins() -> None:
    optimizer = sgd()
    schedule = make("late", optimizer, torch_schedulers.CosineAnnealingLR, when={"begin": STEPS + 5})
    assert rates(optimizer, [schedule]) == [1.0] * (STEPS + 1)


@pytest.mark.parametrize("cut", [2, 4, 5, 11])
@pytest.mark.parametrize("begin", [0, 5])
def test_a_resumed_schedule_goes_on_as_if_nothing_had_happened(cut: int, begin: int) -> None:
    def parts(optimizer: Optimizer) -> list[Schedule]:
        return [
            make("linear", optimizer, torch_schedulers.LinearLR, when={"end": 5}, total_iters=None),
            make("cosine", optimizer, torch_schedulers.CosineAnnealingLR, when={"begin": begin}, T_max=None),
            make("steps", optimizer, torch_schedulers.MultiStepLR, milestones=[6, 12], gamma=0.5),
        ]

    optimizer = sgd()
    whole = rates(optimizer, parts(optimizer))

    optimizer = sgd()
    schedules = parts(optimizer)
    rates(optimizer, schedules, last=cut)
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "schedules": [s.state_dict() for s in schedules]}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)

    resumed = sgd()
    schedules = parts(resumed)
    resumed.load_state_dict(saved["optimizer"])
    for schedule, state in zip(schedules, saved["schedules"], strict=True):
        schedule.load_state_dict(state)
    assert rates(resumed, schedules, first=cut + 1) == whole[cut:]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("OneCycleLR", {"max_lr": 1.0, "total_steps": 30}),
        ("CyclicLR", {"base_lr": 0.1, "max_lr": 1.0}),
        ("ConstantLR", {}),
        ("PolynomialLR", {}),
        ("StepLR", {"step_size": 3}),
    ],
)
def test_the_state_of_torchs_schedulers_needs_no_pickle(name: str, arguments: dict[str, Any]) -> None:
    optimizer = sgd()
    schedule = make("it", optimizer, getattr(torch_schedulers, name), **arguments)
    rates(optimizer, [schedule], last=3)
    file = io.BytesIO()
    torch.save(schedule.state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["scheduler"]["last_epoch"] == 3


def plateau(optimizer: Optimizer, **when: Any) -> Schedule:
    target = torch_schedulers.ReduceLROnPlateau
    return make(
        "plateau", optimizer, target, when={"by_epoch": True, "monitor": "loss", **when}, patience=1, factor=0.5
    )


def test_a_plateau_follows_its_metric() -> None:
    optimizer = sgd()
    schedule = plateau(optimizer)
    seen = []
    for epoch, loss in enumerate([1.0, 0.9, 0.95, 0.95, 0.8, 0.8, 0.8], 1):
        schedule.step(epoch)
        schedule.step(epoch, {"accuracy": 0.1, "loss": loss})
        seen.append(optimizer.param_groups[0]["lr"])
    assert seen == [1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.25]


def test_a_plateau_looks_at_its_metric_from_begin_to_end() -> None:
    optimizer = sgd()
    schedule = plateau(optimizer, begin=3, end=6)
    seen = []
    for epoch in range(1, 11):
        schedule.step(epoch, {"loss": 1.0})
        seen.append(optimizer.param_groups[0]["lr"])
    assert seen == [1.0] * 4 + [0.5] * 6


def test_a_monitor_that_nobody_reports_is_refused_with_the_close_one() -> None:
    schedule = make("plateau", sgd(), torch_schedulers.ReduceLROnPlateau, when={"monitor": "acuracy"})
    for check in (lambda: schedule.check_monitor(("accuracy", "loss")), lambda: schedule.step(1, {"accuracy": 1.0})):
        with pytest.raises(UserError, match="Did you mean accuracy") as caught:
            check()
        assert caught.value.key == "scheduler.plateau.monitor"
    plateau(sgd()).check_monitor(("accuracy", "loss"))


@pytest.mark.parametrize(
    ("target", "when", "key"),
    [
        (torch_schedulers.CosineAnnealingLR, {"begin": 5, "end": 3}, "scheduler.mine.begin"),
        (torch_schedulers.CosineAnnealingLR, {"begin": 3, "end": 3}, "scheduler.mine.begin"),
        (torch_schedulers.CosineAnnealingLR, {"begin": -1}, "scheduler.mine.begin"),
        (torch_schedulers.CosineAnnealingLR, {"monitor": "loss"}, "scheduler.mine.monitor"),
        (torch_schedulers.ReduceLROnPlateau, {}, "scheduler.mine.monitor"),
        (torch_schedulers.StepLR, {}, "scheduler.mine"),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_options_that_do_not_fit_name_their_key(target: Any, when: dict[str, Any], key: str, late: bool) -> None:
    if late and not when:
        when = {"begin": 7}
    with pytest.raises(UserError) as caught:
        make("mine", sgd(), target, when=when)
    assert caught.value.key == key


def test_a_schedule_changes_more_than_the_learning_rate() -> None:
    optimizer = sgd()
    schedule = make("cycle", optimizer, torch_schedulers.OneCycleLR, max_lr=1.0, total_steps=None)
    assert optimizer.param_groups[0]["momentum"] == 0.95
    rates(optimizer, [schedule], last=6)
    assert optimizer.param_groups[0]["momentum"] < 0.9
