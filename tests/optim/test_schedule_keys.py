"""Schedules of momentum, weight decay and other keys of the parameter groups."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
from torch.optim import SGD, AdamW, Optimizer

from hydraloop.errors import UserError
from hydraloop.optim import Cosine, Exponential, Linear, MultiStep, Plateau, Schedule
from hydraloop.schemas.scheduler import OPTIONS
from tests.optim.scheduled import LRS, STEPS, STEPS_PER_EPOCH, of, option, resumed, run, two_groups, values

DOWN = Exponential(0.5)


@pytest.mark.parametrize(
    ("kind", "param", "key", "expected"),
    [
        (SGD, "momentum", "momentum", [0.45, 0.45]),
        (SGD, "weight_decay", "weight_decay", [0.05, 0.25]),
        (AdamW, "weight_decay", "weight_decay", [0.05, 0.25]),
        (AdamW, "momentum", "betas", [(0.45, 0.999)] * 2),
        (AdamW, "betas.0", "betas", [(0.45, 0.999)] * 2),
        (AdamW, "betas.1", "betas", [(0.9, 0.4995)] * 2),
        (AdamW, "betas", "betas", [(0.45, 0.4995)] * 2),
        (AdamW, "eps", "eps", [5e-9] * 2),
    ],
)
def test_a_schedule_changes_the_key_it_names_and_no_other(
    kind: type[Optimizer], param: str, key: str, expected: list[Any]
) -> None:
    optimizer = two_groups(kind)
    before = [dict(group) for group in optimizer.param_groups]
    run(optimizer, [of("it", DOWN, optimizer, param=param)], 1)
    assert values(optimizer, key) == expected
    for group, old in zip(optimizer.param_groups, before, strict=True):
        assert {name: group[name] for name in old if name != key} == {n: v for n, v in old.items() if n != key}


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_every_option_can_change_every_key(name: str) -> None:
    """A key with the lr's values is scheduled like the lr."""
    one, other = two_groups(), two_groups()
    for group in other.param_groups:
        group["weight_decay"] = group["lr"]
    expected = run(one, [option(name, one, param="lr")])
    assert run(other, [option(name, other, param="weight_decay")], key="weight_decay") == expected
    assert values(other) == list(LRS)


def test_an_optimizer_whose_betas_is_one_number_can_be_scheduled() -> None:
    optimizer = two_groups()
    for group in optimizer.param_groups:
        group["betas"] = 1.0
    assert run(optimizer, [of("betas", DOWN, optimizer, param="betas")], 2, key="betas")[1] == [0.5, 0.5]


def _stepped_cosine(n: int) -> float:
    n = min(n, STEPS - 1)
    return 0.5 ** (n // 4) * (1 + math.cos(math.pi * n / STEPS)) / 2


@pytest.mark.parametrize("param", ["lr", "weight_decay", "betas.1"])
def test_several_schedules_of_one_key_multiply(param: str) -> None:
    optimizer = two_groups(AdamW)
    key = param.partition(".")[0]
    first = values(optimizer, key)[0]
    base = first[1] if isinstance(first, tuple) else first
    schedules = [
        of("steps", MultiStep(range(4, STEPS, 4), 0.5), optimizer, param=param),
        of("cosine", Cosine(), optimizer, param=param),
    ]
    for n, found in enumerate(run(optimizer, schedules, key=key)):
        value = found[0][1] if isinstance(found[0], tuple) else found[0]
        assert value == pytest.approx(base * _stepped_cosine(n), abs=1e-12)


@pytest.mark.parametrize("cut", [0, 3, 8])
def test_a_cosine_rises_to_the_value_of_the_config(cut: int) -> None:
    """Not with the result of another schedule; in a resumed run too."""

    def make(optimizer: Optimizer, param: str) -> list[Schedule]:
        return [
            of("half", Linear(1.0, 0.5), optimizer, end=5, param=param),
            of("again", Cosine(T_max=4), optimizer, begin=5, param=param),
        ]

    seen = {}
    for param in ("lr", "weight_decay"):
        optimizer = two_groups()
        for group in optimizer.param_groups:
            group["weight_decay"] = group["lr"]
        schedules = make(optimizer, param)
        seen[param] = run(optimizer, schedules, cut, key=param)[:-1]
        optimizer, schedules = resumed(optimizer, schedules, partial(make, param=param))
        seen[param] += run(optimizer, schedules, 20, first=cut + 1, key=param)
    assert seen["weight_decay"] == seen["lr"]
    assert seen["lr"][13][0] == LRS[0]


@pytest.mark.parametrize(
    ("kind", "param", "remedy"),
    [
        (SGD, "momntum", "Did you mean momentum?"),
        (SGD, "betas", "Known: dampening, lr, momentum, weight_decay."),
        (AdamW, "betas.2", "Did you mean betas.1, betas.0 or betas?"),
        (SGD, "nesterov", "dampening"),
        (SGD, "params", "dampening"),
        (SGD, "initial_lr", "dampening"),
    ],
)
def test_an_unknown_key_lists_the_known_ones(kind: type[Optimizer], param: str, remedy: str) -> None:
    optimizer = two_groups(kind)
    of("first", DOWN, optimizer)
    with pytest.raises(UserError) as caught:
        of("mine", DOWN, optimizer, param=param)
    assert caught.value.key == "scheduler.mine.param"
    assert remedy in str(caught.value)


N = STEPS_PER_EPOCH
CONVERTED: dict[str, Any] = {"by_epoch": True, "convert_to_iter_based": True}


def test_begin_and_end_are_epochs_too() -> None:
    optimizer = two_groups()
    schedule = of("it", Exponential(0.5), optimizer, begin=2, end=4, **CONVERTED)
    seen = [lrs[0] for lrs in run(optimizer, [schedule])]
    assert (schedule.begin, schedule.end) == (2 * N, 4 * N)
    assert seen[: 2 * N + 1] == [1.0] * (2 * N + 1)
    assert seen[2 * N + 1] == 0.5  # gamma is of each optimizer step, as in MMEngine
    assert seen[4 * N :] == [0.5 ** (2 * N - 1)] * (STEPS - 4 * N + 1)


@pytest.mark.parametrize("changes", [{}, {"by_epoch": True}])
def test_steps_and_validations_cannot_be_converted(changes: dict[str, Any]) -> None:
    function = Plateau() if changes else MultiStep([3])
    monitor = "loss" if changes else None
    with pytest.raises(UserError, match="no epochs to convert") as caught:
        of("it", function, two_groups(), convert_to_iter_based=True, monitor=monitor, **changes)
    assert caught.value.key == "scheduler.it.convert_to_iter_based"


def test_without_training_data_lengths_stay() -> None:
    optimizer = two_groups()
    assert option("cosine", optimizer, T_max=5, steps_per_epoch=0, **CONVERTED).function.T_max == 5


@pytest.mark.parametrize(
    ("name", "changes", "field", "text"),
    [
        ("cosine", {"begin": 5, "end": 3}, "begin", "not before end=3"),
        ("cosine", {"param": "momentun"}, "param", "Did you mean momentum?"),
        ("multistep", {"milestones": [7, 3]}, "milestones", "Use [3, 7]."),
        ("plateau", {"mode": "least"}, "mode", "Known: max, min."),
        ("plateau", {"threshold_mode": "x"}, "threshold_mode", "Known: abs, rel."),
        ("yolox", {"by_epoch": False}, "convert_to_iter_based", "by_epoch=true"),
    ],
)
def test_a_wrong_option_names_its_key(name: str, changes: dict[str, Any], field: str, text: str) -> None:
    optimizer = two_groups()
    before = [dict(group) for group in optimizer.param_groups]
    with pytest.raises(UserError) as caught:
        option(name, optimizer, **changes)
    assert caught.value.key == f"scheduler.{name}.{field}"
    assert caught.value.remedy
    assert text in str(caught.value)
    assert [dict(group) for group in optimizer.param_groups] == before


@pytest.mark.parametrize(
    ("function", "ours", "key"),
    [
        (Exponential(0.5), {"monitor": "loss"}, "scheduler.mine.monitor"),
        (Plateau(), {}, "scheduler.mine.monitor"),
        (3, {}, "scheduler.mine"),
    ],
)
def test_a_mistake_names_its_key(function: Any, ours: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError) as caught:
        of("mine", function, two_groups(), **ours)
    assert caught.value.key == key


@pytest.mark.parametrize(("epochs", "steps_per_epoch"), [(1, 1), (1, 3), (2, 1)])
@pytest.mark.parametrize("name", sorted(OPTIONS.keys() - {"constant", "linear", "momentum"}))
def test_the_defaults_fit_the_shortest_runs(
    name: str, epochs: int, steps_per_epoch: int, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = two_groups()
    schedule = option(name, optimizer, epochs=epochs, steps_per_epoch=steps_per_epoch)
    run(optimizer, [schedule], epochs * steps_per_epoch)
    assert caplog.text == ""
