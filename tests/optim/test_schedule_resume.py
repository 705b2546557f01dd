"""Schedules of a resumed run: equal to the last bit, and in a longer run equal to a run that had this length."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer

from tests.optim.scheduled import EPOCHS, STEPS, apply, option, resumed, run, two_groups, values

KEYS = {SGD: ("lr", "momentum", "weight_decay"), AdamW: ("lr", "betas", "weight_decay")}
LOSSES = [1.0, 1.0, 0.5, 0.6, 0.4, 0.4, 0.4, 0.3, 0.3, 0.3, 0.3, 0.2, *[0.2] * 12]
SETS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "constant": [("constant", {"end": 30})],
    "cosine": [("cosine", {"eta_min": 0.01})],
    "cosine_restart": [("cosine_restart", {"periods": [2, 4, 6]})],
    "exponential": [("exponential", {})],
    "linear": [("linear", {"end": 30})],
    "multistep": [("multistep", {"milestones": [2, 4, 9]})],
    "onecycle": [("onecycle", {})],
    "plateau": [("plateau", {"patience": 1, "min_lr": 0.005, "mode": "min"})],
    "poly": [("poly", {})],
    "warmup_cosine": [("warmup_cosine", {"warmup_iters": 20})],
    "yolox": [("yolox", {"warmup_iters": 3, "num_last_epochs": 2})],
    "step": [("step", {"step_size": 4})],
    "momentum": [("momentum", {"end": 30})],
    "char_lm's": [("linear", {"end": 20}), ("cosine", {"eta_min": 0.01})],
    "later": [("linear", {"end": 20}), ("cosine", {"begin": 20}), ("momentum", {"begin": 10, "end": 50})],
    "converted": [("multistep", {"milestones": [2, 4, 9], "convert_to_iter_based": True})],
    "two of a key": [("cosine", {"param": "weight_decay"}), ("poly", {"param": "weight_decay"})],
    "onecycle of another key": [("onecycle", {"param": "weight_decay", "begin": 10})],
    "with a plateau": [("poly", {}), ("plateau", {"patience": 0, "mode": "min"})],
}


def make(name: str, optimizer: Optimizer, **length: int) -> list[Any]:
    return [option(option_name, optimizer, **length, **changes) for option_name, changes in SETS[name]]


@pytest.mark.parametrize("cut", [7, 10, 25])
@pytest.mark.parametrize("kind", [SGD, AdamW])
@pytest.mark.parametrize("name", SETS)
def test_a_resumed_run_has_the_same_values_to_the_last_bit(name: str, kind: type[Optimizer], cut: int) -> None:
    for key in KEYS[kind]:
        optimizer = two_groups(kind)
        whole = run(optimizer, make(name, optimizer), key=key, losses=LOSSES)
        optimizer = two_groups(kind)
        schedules = make(name, optimizer)
        run(optimizer, schedules, cut, key=key, losses=LOSSES)
        again, made = resumed(optimizer, schedules, partial(make, name))
        assert run(again, made, first=cut + 1, key=key, losses=LOSSES) == whole[cut:]


@pytest.mark.parametrize("cut", [7, 30, STEPS])
@pytest.mark.parametrize("name", SETS)
def test_a_longer_run_has_its_own_schedules(name: str, cut: int, caplog: pytest.LogCaptureFixture) -> None:
    epochs, steps = 2 * EPOCHS, 2 * STEPS
    for key in ("lr", "momentum", "weight_decay"):
        optimizer = two_groups()
        expected = run(optimizer, make(name, optimizer, epochs=epochs), steps, key=key, losses=LOSSES)
        optimizer = two_groups()
        schedules = make(name, optimizer)
        run(optimizer, schedules, cut, losses=LOSSES)
        again, made = resumed(optimizer, schedules, partial(make, name, epochs=epochs))
        assert run(again, made, steps, first=cut + 1, key=key, losses=LOSSES) == expected[cut:]
    kept = name in ("constant", "linear", "momentum", "plateau")
    assert ("before the run was resumed" in caplog.text) == (not kept)


def test_another_length_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = two_groups()
    with caplog.at_level(logging.WARNING):
        resumed(optimizer, [option("cosine", optimizer)], lambda fresh: [option("cosine", fresh, epochs=24)])
    assert caplog.messages == ["scheduler.cosine acts from 0 to 120; before the run was resumed, it acted from 0 to 60"]


def test_a_typed_value_acts_as_if_the_run_had_begun_with_it() -> None:
    """For a plateau with a lowest value too."""

    def both(optimizer: Optimizer) -> list[Any]:
        return make("plateau", optimizer)

    other = two_groups()
    other.param_groups[0]["lr"] = 0.06
    expected = run(other, both(other), losses=LOSSES)
    optimizer = two_groups()
    schedules = both(optimizer)
    run(optimizer, schedules, 35, losses=LOSSES)
    again, made = resumed(optimizer, schedules, both)
    again.param_groups[0]["initial_lr"] = 0.06  # as the engine does
    assert run(again, made, first=36, losses=LOSSES) == expected[35:]


def test_an_lr_that_is_a_tensor() -> None:
    optimizer = two_groups(AdamW)
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"], dtype=torch.float64)
    held = values(optimizer)
    apply(optimizer, make("poly", optimizer), 30)
    assert [float(lr) for lr in held] == pytest.approx([lr * (29 / 59) ** 0.9 for lr in (1.0, 0.2)])
    assert all(new is old for new, old in zip(values(optimizer), held, strict=True))
    assert isinstance(optimizer.param_groups[0]["initial_lr"], float)
