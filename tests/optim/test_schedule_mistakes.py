"""Wrong options of schedules: one message with key and fix before training."""

from __future__ import annotations

from typing import Any

import pytest

from hydraloop.errors import UserError
from hydraloop.optim import Exponential, Plateau
from hydraloop.schemas.scheduler import OPTIONS
from tests.optim.scheduled import of, option, run, two_groups


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
