"""An epoch schedule stepped by optimizer step: `convert_to_iter_based`, as MMEngine's `build_iter_from_epoch`."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch.optim import SGD, AdamW, Optimizer
from torch.optim import lr_scheduler as torchs

from hydraloop.errors import UserError
from tests.optim.scheduled import EPOCHS, LRS, STEPS, STEPS_PER_EPOCH, of, option, run, two_groups

N = STEPS_PER_EPOCH
CONVERTED: dict[str, Any] = {"by_epoch": True, "convert_to_iter_based": True}

# MMEngine 0.10.7, optim/scheduler/param_scheduler.py, build_iter_from_epoch: `T_max * epoch_length`,
# `step_size * epoch_length`, `[i * epoch_length for i in milestones]`, begin and end times epoch_length. Its
# ExponentialParamScheduler keeps gamma, so that it falls faster; here it has the same value after each epoch.
CASES: list[tuple[Any, Callable[[float], float]]] = [
    (partial(torchs.CosineAnnealingLR), lambda epoch: (1 + math.cos(math.pi * epoch / EPOCHS)) / 2),
    (partial(torchs.CosineAnnealingLR, T_max=EPOCHS), lambda epoch: (1 + math.cos(math.pi * epoch / EPOCHS)) / 2),
    (partial(torchs.LinearLR, total_iters=4), lambda epoch: 1 / 3 + 2 / 3 * min(epoch, 4) / 4),
    (partial(torchs.LinearLR), lambda epoch: 1 / 3 + 2 / 3 * min(epoch, 5) / 5),
    (partial(torchs.PolynomialLR, total_iters=None, power=2.0), lambda epoch: (1 - epoch / EPOCHS) ** 2),
    (partial(torchs.ExponentialLR, gamma=0.5), lambda epoch: 0.5**epoch),
    (partial(torchs.MultiStepLR, milestones=[2, 7], gamma=0.5), lambda epoch: 0.5 ** bisect_right([2, 7], epoch)),
    (partial(torchs.StepLR, step_size=3, gamma=0.5), lambda epoch: 0.5 ** (epoch // 3)),
    (partial(torchs.ConstantLR, factor=0.5, total_iters=3), lambda epoch: 0.5 if epoch < 3 else 1.0),
    (partial(torchs.CosineAnnealingWarmRestarts, T_0=3), lambda epoch: (1 + math.cos(math.pi * (epoch % 3) / 3)) / 2),
    (partial(torchs.CyclicLR, base_lr=0.1, max_lr=0.5, step_size_up=3, cycle_momentum=False),
     lambda epoch: 0.1 + 0.4 * (1 - abs((epoch % 6) / 3 - 1))),
    (partial(torchs.OneCycleLR, max_lr=1.0, total_steps=None, pct_start=0.5, anneal_strategy="linear"),
     lambda epoch: 1 / 25 + 24 / 25 * epoch * N / (0.5 * STEPS - 1) if epoch * N < 0.5 * STEPS else -1.0),
]  # fmt: skip


@pytest.mark.parametrize("kind", [SGD, AdamW])
@pytest.mark.parametrize(("factory", "formula"), CASES, ids=lambda case: getattr(case, "func", case).__name__)
def test_it_is_the_same_curve_in_finer_steps(
    factory: Any, formula: Callable[[float], float], kind: type[Optimizer]
) -> None:
    """With every step counted as a part of an epoch, down to the last bits."""
    optimizer = two_groups(kind)
    schedule = of("it", factory, optimizer, **CONVERTED)
    assert not schedule.by_epoch
    base = 1.0 if "base_lr" not in factory.keywords else None
    for n, lrs in enumerate(run(optimizer, [schedule])):
        expected = formula(n / N)
        if expected >= 0:
            assert lrs[0] == pytest.approx(expected * LRS[0], rel=1e-9, abs=1e-12), n
            if base is not None and "max_lr" not in factory.keywords:
                assert lrs[1] == pytest.approx(expected * LRS[1], rel=1e-9, abs=1e-12), n


def test_begin_and_end_are_epochs_too() -> None:
    optimizer = two_groups()
    schedule = of("it", partial(torchs.ExponentialLR, gamma=0.5), optimizer, begin=2, end=4, **CONVERTED)
    seen = [lrs[0] for lrs in run(optimizer, [schedule])]
    assert (schedule.begin, schedule.end) == (2 * N, 4 * N)
    assert seen[: 2 * N + 1] == [1.0] * (2 * N + 1)
    assert seen[2 * N + 1] == pytest.approx(0.5 ** (1 / N))
    assert seen[4 * N :] == [pytest.approx(0.25)] * (STEPS - 4 * N + 1)


def test_without_it_nothing_changes_within_an_epoch() -> None:
    optimizer = two_groups()
    seen = run(optimizer, [option("cosine", optimizer, by_epoch=True)])
    assert all(len({lrs[0] for lrs in seen[epoch * N : (epoch + 1) * N]}) == 1 for epoch in range(EPOCHS))


class Mine(torchs.StepLR):
    """A subclass may count otherwise than torch's class."""


class MineThatSaysIt(Mine):
    lengths = ("step_size",)


def test_a_class_of_ones_own_can_say_what_counts() -> None:
    optimizer = two_groups()
    schedule = of("mine", partial(MineThatSaysIt, step_size=3, gamma=0.5), optimizer, **CONVERTED)
    seen = run(optimizer, [schedule])
    assert [seen[3 * N - 1][0], seen[3 * N][0], seen[6 * N][0]] == [1.0, 0.5, 0.25]


@pytest.mark.parametrize(
    "factory",
    [
        partial(Mine, step_size=3),
        partial(torchs.LambdaLR, lr_lambda=lambda n: 1.0),
        partial(torchs.MultiplicativeLR, lr_lambda=lambda n: 1.0),
        partial(lambda optimizer: None),
    ],
)
def test_a_scheduler_of_which_nobody_knows_it_is_refused(factory: Any) -> None:
    with pytest.raises(UserError, match="count epochs is not known") as caught:
        of("mine", factory, two_groups(), **CONVERTED)
    assert caught.value.key == "scheduler.mine.convert_to_iter_based"
    assert "lengths" in str(caught.value.remedy)


def test_steps_cannot_be_converted() -> None:
    with pytest.raises(UserError, match="no epochs to convert") as caught:
        option("cosine", two_groups(), convert_to_iter_based=True)
    assert caught.value.key == "scheduler.cosine.convert_to_iter_based"
    plateau = partial(torchs.ReduceLROnPlateau)
    with pytest.raises(UserError, match="is not known"):
        of("plateau", plateau, two_groups(), monitor="loss", **CONVERTED)


def test_without_training_data_nothing_is_converted_to_nothing() -> None:
    optimizer = two_groups()
    schedule = option("cosine", optimizer, T_max=5, steps_per_epoch=0, **CONVERTED)
    assert schedule.scheduler is not None
