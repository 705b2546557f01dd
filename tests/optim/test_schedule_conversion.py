"""`convert_to_iter_based`: epochs in optimizer steps. test_mmengine_values.py compares the values."""

from __future__ import annotations

from typing import Any

import pytest

from hydraloop.errors import UserError
from hydraloop.optim import Exponential, MultiStep, Plateau
from tests.optim.scheduled import STEPS, STEPS_PER_EPOCH, of, option, run, two_groups

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
