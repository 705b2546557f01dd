"""The order of hooks, the call table, and what happens to a hook's errors."""

from __future__ import annotations

import logging
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import hydraloop
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook, Mode
from hydraloop.engine.hook_order import CallTable, Slot, check_order, in_order, mount_points_of, slot_of
from hydraloop.errors import UserError
from tests.helpers import At, Recorder, at, batches, failing, make_engine, tiny_task


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


ROOT = Path(__file__).parents[2]


# Order. --------------------------------------------------------------------------------------------------------------


def test_the_order_is_the_same_at_every_mount_point_closing_ones_included(tmp_path: Path) -> None:
    def run(error_at: str | None) -> list[str]:
        trace: list[str] = []
        late, early, default = (Recorder(trace, f"{name} ") for name in ("late", "early", "default"))
        hooks: dict[str, Hook] = {"late": late, "early": early, "default": default}
        slots = [slot_of("late", late), slot_of("early", early, "HIGH"), slot_of("default", default, is_default=True)]
        if error_at is not None:
            hooks["failing"] = failing(error_at)
            slots.append(slot_of("failing", hooks["failing"], 100))
        task = tiny_task()
        engine = make_engine(tmp_path, hooks, train=batches(1), val=batches(1), test=batches(1), task=task, slots=slots)
        with pytest.raises(RuntimeError) if error_at else nullcontext():
            engine.train()
        return trace

    for trace in (run(None), run("after_train_iter")):
        points = [entry.split(" ", 1)[1] for entry in trace[::3]]
        assert trace == [f"{name} {point}" for point in points for name in ("early", "default", "late")]
    assert points[-3:] == ["on_exception", "after_train", "after_run"]


def test_the_builder_checks_the_order(tmp_path: Path) -> None:
    overrides = ["hooks=[ema]", "hooks.ema.priority=95"]
    with pytest.raises(UserError, match="must run after ema") as caught:
        hydraloop.build(hydraloop.compose(overrides, folder=ROOT), run_dir=tmp_path)
    assert caught.value.key == "default_hooks.checkpoint.priority"


# Errors of hooks. ----------------------------------------------------------------------------------------------------


def test_raise_ends_the_run_with_a_note_of_hook_and_mount_point(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, {"mine": failing("after_train_iter")})
    with pytest.raises(RuntimeError, match="on purpose") as caught:
        engine.train()
    assert caught.value.__notes__ == ["hydraloop: raised in the hook 'mine' at after_train_iter"]
    assert engine.error is caught.value
    innermost = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert innermost.name == "act", "the traceback ends where the hook raised"
    assert innermost.filename.endswith("helpers.py")


def test_warn_warns_once_for_each_cause(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def full(engine: Engine) -> None:
        raise OSError(f"No space left on device: 'file {engine.progress.iteration}'")

    hook = at("after_train_iter", full, nth=0, on_error="warn")
    engine = make_engine(tmp_path, {"mine": hook}, train=batches(106))
    with caplog.at_level(logging.WARNING):
        engine.train()
    assert engine.progress.iteration == 106
    (first,) = [record for record in caplog.records if "mine" in record.message]
    assert first.message == (
        "hook mine failed at after_train_iter; the run continues (on_error=warn): "
        "OSError: No space left on device: 'file 1'"
    )
    assert first.exc_info is not None, "the traceback is in the log"


def test_another_type_or_place_of_an_error_has_its_own_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def act(engine: Engine) -> None:
        if engine.progress.iteration % 4 == 0:
            raise ValueError("here")
        if engine.progress.iteration % 4 == 1:
            raise ValueError("there")
        if engine.progress.iteration % 4 == 2:
            int("x")
        float("x")

    other = failing("after_run", on_error="warn")
    hooks = {"mine": at("after_train_iter", act, nth=0, on_error="warn"), "other": other}
    engine = make_engine(tmp_path, hooks, train=batches(9))
    with caplog.at_level(logging.WARNING):
        engine.train()
    assert [record.message.rpartition("(on_error=warn): ")[2] for record in caplog.records] == [
        "ValueError: there",
        "ValueError: invalid literal for int() with base 10: 'x'",
        "ValueError: could not convert string to float: 'x'",
        "ValueError: here",
        "RuntimeError: on purpose",
    ]


def test_disable_warns_once_and_switches_the_hook_off_but_lets_it_close(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []
    hook = type(
        "Two",
        (At,),
        {
            "before_train_iter": lambda self, engine, *_: calls.append("before"),
            "after_train_iter": lambda self, engine, *_: 1 / 0,
            "after_run": lambda self, engine: calls.append("after_run"),
            "on_error": "disable",
        },
    )()
    with caplog.at_level(logging.WARNING):
        make_engine(tmp_path, {"mine": hook}, train=batches(3)).train()
    assert calls == ["before", "after_run"]
    assert [record.message for record in caplog.records if "mine" in record.message] == [
        "hook mine failed at after_train_iter; it is switched off (on_error=disable): "
        "ZeroDivisionError: division by zero"
    ]


@pytest.mark.parametrize("on_error", ["raise", "warn", "disable"])
def test_a_users_mistake_is_always_raised(tmp_path: Path, on_error: str) -> None:
    mistake = UserError("no such thing", key="hooks.mine.option", remedy="Try another.")
    engine = make_engine(tmp_path, {"mine": failing("before_run", mistake, on_error=on_error)})
    with pytest.raises(UserError) as caught:
        engine.train()
    assert caught.value is mistake


@pytest.mark.parametrize("on_error", ["warn", "disable"])
def test_an_interrupt_is_never_swallowed(tmp_path: Path, on_error: str) -> None:
    engine = make_engine(tmp_path, {"mine": failing("before_run", KeyboardInterrupt(), on_error=on_error)})
    with pytest.raises(KeyboardInterrupt):
        engine.train()


def test_rank_zero_only_hooks_are_left_out_on_other_ranks() -> None:
    called: list[str] = []
    hooks = {
        "main": at("before_run", lambda engine: called.append("main"), nth=0, rank_zero_only=True),
        "all": at("before_run", lambda engine: called.append("all"), nth=0),
    }
    for rank, expected in ((0, ["main", "all"]), (1, ["all"])):
        called.clear()
        CallTable(None, hooks, rank=rank).before_run()
        assert called == expected
    assert _names(CallTable(None, hooks, rank=1).slots) == ["main", "all"], "the order is the same on all ranks"


def test_a_hook_is_not_called_at_its_idle_points(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.idle_points = ("before_train_iter", "after_train_iter")
    make_engine(tmp_path, {"recorder": recorder}, train=batches(2)).train()
    assert "before_train_epoch" in recorder.trace
    assert not [entry for entry in recorder.trace if "train_iter" in entry]


def test_the_time_of_each_hook_is_added_up(tmp_path: Path) -> None:
    def work(engine: Engine) -> None:
        sum(range(20_000))

    engine = make_engine(tmp_path, {"busy": at("after_train_iter", work, nth=0), "idle": Hook()})
    engine.train()
    assert engine.calls.seconds["busy"][0] > 0
    assert engine.calls.seconds["idle"] == [0.0]
