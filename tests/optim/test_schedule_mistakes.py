"""Options of schedules out of range: one message before anything is trained, with the key and what to do."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.optim import Adagrad

from hydraloop.errors import UserError
from hydraloop.optim import Constant, CosineRestart, Exponential, OneCycle, Plateau, Step
from tests.optim.scheduled import EPOCHS, of, option, run, two_groups

NAN = float("nan")


@pytest.mark.parametrize(
    ("name", "changes", "field", "text"),
    [
        ("cosine", {"begin": 5, "end": 3}, "begin", "not before the end, 3"),
        ("cosine", {"begin": 3, "end": 3}, "begin", "Use a begin below 3"),
        ("cosine", {"begin": -1}, "begin", "Use 0 for the start"),
        ("cosine", {"T_max": 0}, "T_max", "Use a whole number from 1."),
        ("cosine", {"eta_min": -1.0}, "eta_min", "Use a number from 0."),
        ("cosine", {"param": "momentun"}, "param", "Did you mean momentum?"),
        ("linear", {"start_factor": 0.0}, "start_factor", "above 0, up to 1"),
        ("linear", {"end_factor": 1.5}, "end_factor", "from 0 to 1"),
        ("linear", {"total_iters": -5}, "total_iters", "from 1"),
        ("momentum", {"start_factor": -0.5}, "start_factor", "above 0"),
        ("multistep", {"milestones": [7, 3]}, "milestones", r"in order: [3, 7]"),
        ("multistep", {"milestones": [3, 3]}, "milestones", "[3]"),
        ("multistep", {"milestones": [0, 3]}, "milestones", "from 1"),
        ("multistep", {"gamma": 0.0}, "gamma", "above 0"),
        ("multistep", {"gamma": NAN}, "gamma", "above 0"),
        ("onecycle", {"max_lr": -1.0}, "max_lr", "above 0"),
        ("onecycle", {"max_lr": [0.1, 0.0]}, "max_lr", "above 0"),
        ("onecycle", {"pct_start": 1.5}, "pct_start", "from 0 to 1"),
        ("onecycle", {"anneal_strategy": "cosine"}, "anneal_strategy", "Use cos or linear."),
        ("onecycle", {"div_factor": 0.0}, "div_factor", "above 0"),
        ("onecycle", {"base_momentum": 2.0}, "base_momentum", "from 0 to 1"),
        ("onecycle", {"total_steps": 0}, "total_steps", "from 1"),
        ("poly", {"power": 0.0}, "power", "above 0"),
        ("poly", {"power": -1.0}, "power", "above 0"),
        ("plateau", {"patience": -1}, "patience", "whole number from 0"),
        ("plateau", {"cooldown": -1}, "cooldown", "whole number from 0"),
        ("plateau", {"factor": 1.0}, "factor", "between 0 and 1"),
        ("plateau", {"factor": -0.1}, "factor", "between 0 and 1"),
        ("plateau", {"mode": "least"}, "mode", "Use min or max."),
        ("plateau", {"threshold_mode": "x"}, "threshold_mode", "Use rel or abs."),
        ("plateau", {"threshold": -1.0}, "threshold", "from 0"),
        ("plateau", {"min_lr": -1.0}, "min_lr", "from 0"),
        ("warmup_cosine", {"warmup_iters": -1}, "warmup_iters", "whole number from 0"),
        ("warmup_cosine", {"warmup_iters": 60}, "warmup_iters", "60 optimizer steps nothing is left"),
        ("warmup_cosine", {"warmup_iters": 12, "by_epoch": True}, "warmup_iters", "12 epochs"),
        ("warmup_cosine", {"warmup_iters": 30, "begin": 20, "end": 50}, "warmup_iters", "30 optimizer steps"),
        ("warmup_cosine", {"min_lr_ratio": 1.1}, "min_lr_ratio", "from 0 to 1"),
        ("warmup_cosine", {"start_factor": 0.0}, "start_factor", "above 0"),
        ("yolox", {"min_lr_ratio": -0.1}, "min_lr_ratio", "from 0 to 1"),
        ("yolox", {"warmup_ratio": 0.0}, "warmup_ratio", "above 0"),
        ("yolox", {"num_last_epochs": -1}, "num_last_epochs", "whole number from 0"),
        ("yolox", {"num_last_epochs": 15}, "num_last_epochs", "num_last_epochs=null"),
        ("yolox", {"warmup_iters": 13}, "warmup_iters", "warmup_iters=null"),
        ("yolox", {"warmup_iters": 5, "num_last_epochs": 7}, "num_last_epochs", "12 epochs nothing is left"),
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
        (Step(0), {}, "scheduler.mine.step_size"),
        (Step("3"), {}, "scheduler.mine.step_size"),  # type: ignore[arg-type]
        (Exponential(gamma=True), {}, "scheduler.mine.gamma"),
        (Constant(factor=2.0), {}, "scheduler.mine.factor"),
        (CosineRestart([0, 3]), {}, "scheduler.mine.periods"),
        (OneCycle(max_lr=[1.0]), {}, "scheduler.mine.max_lr"),
        (Step(3), {"begin": "1"}, "scheduler.mine.begin"),
        (Step(3), {"end": 1.5}, "scheduler.mine.end"),
        (Step(3), {"monitor": "loss"}, "scheduler.mine.monitor"),
        (Plateau(), {}, "scheduler.mine.monitor"),
        (3, {}, "scheduler.mine"),
    ],
)
def test_a_mistake_names_its_key(function: Any, ours: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError) as caught:
        of("mine", function, two_groups(), **ours)
    assert caught.value.key == key


def test_the_arguments_of_a_custom_function_are_not_checked() -> None:
    class Mine(Step):
        """With a negative `gamma`."""

    Mine.__module__ = "mine"
    optimizer = two_groups()
    assert run(optimizer, [of("mine", Mine(1, gamma=-0.5), optimizer)], 1)[1][0] == -0.5


def test_a_cycle_without_a_momentum_says_what_to_set() -> None:
    with pytest.raises(UserError, match="cycle_momentum"):
        option("onecycle", Adagrad([torch.nn.Parameter(torch.zeros(1))]))


@pytest.mark.parametrize(("epochs", "steps_per_epoch"), [(1, 1), (1, 3), (2, 1)])
@pytest.mark.parametrize("name", ["cosine", "multistep", "onecycle", "poly", "plateau", "warmup_cosine", "yolox"])
def test_the_defaults_fit_the_shortest_runs(
    name: str, epochs: int, steps_per_epoch: int, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = two_groups()
    schedule = option(name, optimizer, epochs=epochs, steps_per_epoch=steps_per_epoch)
    run(optimizer, [schedule], epochs * steps_per_epoch)
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"begin": 60}, "begins after 60 optimizer steps and the run ends after 60: it does nothing"),
        ({"begin": EPOCHS + 1, "by_epoch": True}, "begins after 13 epochs and the run ends after 12"),
        ({"end": 61}, "ends after 61 optimizer steps and the run after 60: its end is not reached"),
        ({"begin": 13, "by_epoch": True, "convert_to_iter_based": True}, "begins after 13 epochs"),
        ({"begin": 59, "end": 60}, ""),
    ],
)
def test_what_lies_behind_the_end_of_a_short_run_is_one_warning(
    changes: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        option("poly", two_groups(), **changes)
    assert [words in record.getMessage() for record in caplog.records] == ([True] if words else [])


@pytest.mark.parametrize(
    ("name", "changes", "warns"),
    [
        ("momentum", {}, True),
        ("cosine", {"param": "momentum"}, True),
        ("cosine", {"param": "momentum", "eta_min": 0.9}, False),
        ("onecycle", {"param": "momentum", "max_lr": 0.9}, False),
        ("cosine", {}, False),
    ],
)
def test_a_schedule_that_can_do_nothing_with_a_zero_says_so(
    name: str, changes: dict[str, Any], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = two_groups()
    for group in optimizer.param_groups:
        group["momentum"] = 0.0
    option(name, optimizer, **{"end": 60, **changes})
    assert ("momentum is 0 in all groups" in caplog.text) == warns


@pytest.mark.parametrize(
    ("name", "changes", "warns"),
    [
        ("onecycle", {"total_steps": 20}, True),
        ("onecycle", {"total_steps": 20, "end": 20}, False),
        ("onecycle", {"total_steps": 60}, False),
        ("onecycle", {"total_steps": 61}, False),
        ("poly", {"total_iters": 20}, True),
        ("warmup_cosine", {"total_iters": 20, "begin": 10}, True),
        ("warmup_cosine", {"total_iters": 50, "begin": 10}, False),
        ("yolox", {"total_iters": 6}, True),
        ("yolox", {"total_iters": 12}, False),
        ("linear", {"total_iters": 20, "end": None}, False),
        ("momentum", {"total_iters": 20, "end": None}, False),
    ],
)
def test_a_length_that_leaves_the_rest_at_the_lowest_value_is_one_warning(
    name: str, changes: dict[str, Any], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    option(name, two_groups(), **changes)
    assert caplog.text.count(f"scheduler.{name} is over after ") == warns


@pytest.mark.parametrize(("end", "last"), [(8, 7), (30, 19)])
def test_a_one_cycle_ends_where_the_config_says_or_with_its_last_value(end: int, last: int) -> None:
    optimizer = two_groups()
    seen = [lrs[0] for lrs in run(optimizer, [option("onecycle", optimizer, total_steps=20, end=end)])]
    assert len(set(seen[: last + 1])) > last // 2
    assert set(seen[last:]) == {seen[last]}
    assert seen[last] != seen[last - 1]
