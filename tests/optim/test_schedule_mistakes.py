"""Wrong options of schedules: one message with key and fix before training."""

from __future__ import annotations

from typing import Any

import pytest

from hydraloop.errors import UserError
from hydraloop.optim import Exponential, Function, Plateau
from hydraloop.schemas.scheduler import OPTIONS
from tests.optim.scheduled import of, option, run, two_groups


@pytest.mark.parametrize(
    ("name", "changes", "field", "text"),
    [
        ("cosine", {"begin": 5, "end": 3}, "begin", "not before end=3"),
        ("cosine", {"begin": -1}, "begin", "Use a whole number from 0"),
        ("cosine", {"T_max": 0}, "T_max", "Use 1 or more."),
        ("cosine", {"eta_min": -1.0}, "eta_min", "Use 0 or more."),
        ("cosine", {"param": "momentun"}, "param", "Did you mean momentum?"),
        ("constant", {"factor": 0.0}, "factor", "above 0"),
        ("exponential", {"gamma": -1.0}, "gamma", "above 0"),
        ("linear", {"start_factor": 0.0}, "start_factor", "above 0"),
        ("linear", {"end_factor": -1.5}, "end_factor", "0 or more"),
        ("linear", {"total_iters": -5}, "total_iters", "1 or more"),
        ("multistep", {"milestones": [7, 3]}, "milestones", "Use [3, 7]."),
        ("multistep", {"milestones": [0, 3]}, "milestones", "1 or more"),
        ("multistep", {"gamma": 0.0}, "gamma", "above 0"),
        ("poly", {"power": 0.0}, "power", "above 0"),
        ("plateau", {"patience": -1}, "patience", "0 or more"),
        ("plateau", {"cooldown": -1}, "cooldown", "0 or more"),
("plateau", {"factor": -0.1}, "factor", "above 0"),
        ("plateau", {"mode": "least"}, "mode", "Known: max, min."),
        ("plateau", {"threshold_mode": "x"}, "threshold_mode", "Known: abs, rel."),
        ("plateau", {"threshold": -1.0}, "threshold", "0 or more"),
        ("plateau", {"min_lr": -1.0}, "min_lr", "0 or more"),
        ("warmup_cosine", {"warmup_iters": -1}, "warmup_iters", "0 or more"),
        ("warmup_cosine", {"warmup_iters": 60}, "warmup_iters", "nothing of the schedule's 60 optimizer steps"),
        ("warmup_cosine", {"warmup_iters": 12, "by_epoch": True}, "warmup_iters", "12 epochs"),
        ("warmup_cosine", {"min_lr_ratio": -1.1}, "min_lr_ratio", "0 or more"),
        ("warmup_cosine", {"start_factor": 0.0}, "start_factor", "above 0"),
        ("yolox", {"min_lr_ratio": -0.1}, "min_lr_ratio", "0 or more"),
        ("yolox", {"warmup_ratio": 0.0}, "warmup_ratio", "above 0"),
        ("yolox", {"num_last_epochs": -1}, "num_last_epochs", "0 or more"),
        ("yolox", {"warmup_iters": 13}, "warmup_iters", "warmup_iters=null"),
        ("yolox", {"warmup_iters": 5, "num_last_epochs": 7}, "num_last_epochs", "nothing of the schedule's 12 epochs"),
        ("yolox", {"by_epoch": False}, "convert_to_iter_based", "by_epoch=true"),
    ],
)  # fmt: skip
def test_an_option_out_of_range_names_its_key(name: str, changes: dict[str, Any], field: str, text: str) -> None:
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
        (Exponential(0.5), {"begin": "1"}, "scheduler.mine.begin"),
        (Exponential(0.5), {"end": 1.5}, "scheduler.mine.end"),
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


class Misspelled(Function):
    def values(self, k: int, length: int, value: float, initial: float) -> float:
        return value


def test_a_custom_function_has_a_value() -> None:
    with pytest.raises(UserError, match="Misspelled has no method value") as caught:
        of("mine", Misspelled(), two_groups())
    assert caught.value.key == "scheduler.mine._target_"
    assert caught.value.remedy == "Write: def value(self, k, length, value, initial)"
