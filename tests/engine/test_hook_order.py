"""The order of hooks, and the check of that order."""

from __future__ import annotations

from typing import Any

import pytest

from hydraloop.engine.call_table import Slot, check_order, in_order, mount_points_of, slot_of
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook, Mode
from hydraloop.errors import UserError


def _names(slots: list[Slot]) -> list[str]:
    return [slot.name for slot in slots]


def test_priority_then_default_before_custom_then_registration() -> None:
    slots = [
        Slot("custom a", 50, is_default=False),
        Slot("late default", 90, is_default=True),
        Slot("custom b", 50, is_default=False),
        Slot("default a", 50, is_default=True),
        Slot("first", 0, is_default=False),
        Slot("default b", 50, is_default=True),
    ]
    assert _names(in_order(slots)) == ["first", "default a", "default b", "custom a", "custom b", "late default"]


class _Both(Hook):
    def after_run(self, engine: Engine) -> None: ...

    def before_iter(self, engine: Engine, batch_idx: int, batch: Any, mode: Mode) -> None: ...

    def before_run(self, engine: Engine) -> None: ...


class _Child(_Both):
    pass


def test_mount_points_of_a_class_count_general_and_inherited_ones_in_the_order_of_a_run() -> None:
    points = ("before_run", "before_train_iter", "before_val_iter", "before_test_iter", "after_run")
    assert mount_points_of(_Both.overrides) == points
    assert mount_points_of(_Child.overrides) == points
    assert mount_points_of(Hook.overrides) == ()


def test_a_priority_that_is_none_names_the_hooks_key() -> None:
    hook = Hook()
    hook.key = "hooks.mine"
    with pytest.raises(UserError) as caught:
        slot_of("mine", hook, 101)
    assert caught.value.key == "hooks.mine.priority"


def test_an_order_that_breaks_runs_after_names_both_hooks_the_key_and_the_remedy() -> None:
    slots = in_order(
        [
            Slot("ema", 80, is_default=False),
            Slot("checkpoint", 45, is_default=True, runs_after=("param_scheduler", "ema")),
        ]
    )
    with pytest.raises(UserError) as caught:
        check_order(slots, key_of=lambda name: f"default_hooks.{name}")
    message = str(caught.value)
    assert message.startswith("default_hooks.checkpoint.priority: ")
    assert "checkpoint (priority 45)" in message
    assert "ema (priority 80)" in message
    assert "above 80" in message


def test_an_order_that_keeps_runs_after_passes() -> None:
    after_ema = ("ema",)
    check_order(in_order([Slot("c", 90, is_default=True, runs_after=after_ema), Slot("ema", 50, is_default=False)]))
    check_order([Slot("c", 0, is_default=True, runs_after=after_ema)])  # ema is not selected


def test_a_tie_that_breaks_runs_after_is_refused() -> None:
    # The default hook comes first on a tie.
    slots = in_order([Slot("ema", 50, is_default=False), Slot("c", 50, is_default=True, runs_after=("ema",))])
    with pytest.raises(UserError, match=r"c \(priority 50\) must run after ema \(priority 50\)"):
        check_order(slots)
