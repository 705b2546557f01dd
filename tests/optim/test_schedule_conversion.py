"""`convert_to_iter_based`: epochs in optimizer steps. test_mmengine_values.py compares the values."""

from __future__ import annotations

import math
from typing import Any

import pytest
from torch.optim import SGD, AdamW, Optimizer

from hydraloop.errors import UserError
from hydraloop.optim import Exponential, MultiStep, Plateau
from tests.optim.scheduled import EPOCHS, LRS, STEPS, STEPS_PER_EPOCH, of, option, run, two_groups

N = STEPS_PER_EPOCH
CONVERTED: dict[str, Any] = {"by_epoch": True, "convert_to_iter_based": True}


@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_it_is_the_same_curve_in_finer_steps(kind: type[Optimizer]) -> None:
    optimizer = two_groups(kind)
    schedule = option("cosine", optimizer, **CONVERTED)
    assert not schedule.by_epoch
    for n, lrs in enumerate(run(optimizer, [schedule], STEPS - 1)):
        assert lrs == pytest.approx([lr * (1 + math.cos(math.pi * n / N / EPOCHS)) / 2 for lr in LRS]), n


def test_begin_and_end_are_epochs_too() -> None:
    optimizer = two_groups()
    schedule = of("it", Exponential(0.5), optimizer, begin=2, end=4, **CONVERTED)
    seen = [lrs[0] for lrs in run(optimizer, [schedule])]
    assert (schedule.begin, schedule.end) == (2 * N, 4 * N)
    assert seen[: 2 * N + 1] == [1.0] * (2 * N + 1)
    assert seen[2 * N + 1] == 0.5  # gamma is of each optimizer step, as in MMEngine
    assert seen[4 * N :] == [0.5 ** (2 * N - 1)] * (STEPS - 4 * N + 1)


def test_without_it_nothing_changes_within_an_epoch() -> None:
    optimizer = two_groups()
    seen = run(optimizer, [option("cosine", optimizer, by_epoch=True)])
    assert all(len({lrs[0] for lrs in seen[epoch * N : (epoch + 1) * N]}) == 1 for epoch in range(EPOCHS))


def test_lengths_are_converted() -> None:
    optimizer = two_groups()
    schedule = of("steps", MultiStep([3, 6], gamma=0.5), optimizer, **CONVERTED)
    seen = run(optimizer, [schedule])
    assert [seen[3 * N - 1][0], seen[3 * N][0], seen[6 * N][0]] == [1.0, 0.5, 0.25]


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
