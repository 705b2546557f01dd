"""Hook and Priority: names, numbers, misspellings, the general points, the helpers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import hydraloop.engine.hook as hook_module
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import GENERAL_POINTS, MOUNT_POINTS, Hook, Mode, Priority
from hydraloop.errors import UserError
from tests.helpers import at, batches, make_engine

# Priority. -----------------------------------------------------------------------------------------------------------


def test_the_scale_is_mmengines() -> None:
    assert {name: int(value) for name, value in Priority.__members__.items()} == {
        "HIGHEST": 0,
        "VERY_HIGH": 10,
        "HIGH": 30,
        "ABOVE_NORMAL": 40,
        "NORMAL": 50,
        "BELOW_NORMAL": 60,
        "LOW": 70,
        "VERY_LOW": 90,
        "LOWEST": 100,
        "HIGHER": 10,  # iMIX's names
        "LOWER": 90,
    }


@pytest.mark.parametrize(
    ("given", "number"),
    [
        (45, 45),
        ("45", 45),
        (" 7 ", 7),
        ("high", 30),
        ("Very_Low", 90),
        (" lowest ", 100),
        (Priority.LOW, 70),
    ],
)
def test_numbers_and_names_in_any_case(given: int | str, number: int) -> None:
    assert Priority.of(given) == number
    assert type(Priority.of(given)) is int


@pytest.mark.parametrize("given", [-1, 101, "-1", "101", True, 45.5, None])
def test_a_number_out_of_range_is_refused(given: Any) -> None:
    with pytest.raises(UserError, match="out of range") as caught:
        Priority.of(given, key="hooks.ema.priority")
    assert caught.value.key == "hooks.ema.priority"
    assert "0 (first) to 100 (last)" in str(caught.value)


@pytest.mark.parametrize(("given", "close"), [("HIHG", "HIGH"), ("very low", "VERY_LOW"), ("normall", "NORMAL")])
def test_an_unknown_name_is_refused_with_the_close_one(given: str, close: str) -> None:
    with pytest.raises(UserError, match="there is no priority") as caught:
        Priority.of(given, key="hooks.ema.priority")
    message = str(caught.value)
    assert message.startswith("hooks.ema.priority: ")
    assert given in message
    assert re.search(rf"Did you mean .*\b{close}\b", message)


# Misspelled mount points. ---------------------------------------------------------------------------------------------


def _method(self: Any, engine: Engine, *arguments: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("after_trian_iter", "after_train_iter"),
        ("after_train_iteration", "after_train_iter"),
        ("on_exeption", "on_exception"),
        ("at_positon", "at_position"),
    ],
)
def test_a_misspelt_mount_point_is_refused_when_the_class_is_created(name: str, close: str) -> None:
    with pytest.raises(UserError, match="there is no such mount point") as caught:
        type("MyHook", (Hook,), {name: _method})
    message = str(caught.value)
    assert name in message
    assert "MyHook" in message
    assert close in message
    assert "underscore" in message


def test_a_mount_point_that_could_not_be_called_is_refused_when_the_class_is_created() -> None:
    def before_optimizer_step(self: Hook, engine: Any, **_: Any) -> None: ...

    with pytest.raises(UserError, match="engine, batch_idx, batch, outputs") as caught:
        type("MyHook", (Hook,), {"before_optimizer_step": before_optimizer_step})
    assert "Write def before_optimizer_step(self, engine, batch_idx, batch, outputs):" in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        *("_after_trian_iter", "_on_gpu", "update", "summary", "state_dict", "every_n_epochs"),
        *("_at_positon", "at_point", "at_pos", "at_once", "at_boundary", "position"),
    ],
)
def test_helpers_are_no_mount_points(name: str) -> None:
    made = type("MyHook", (Hook,), {name: _method})
    assert name in vars(made)


def test_there_are_27_mount_points_and_four_general_ones() -> None:
    assert len(set(MOUNT_POINTS)) == 27
    assert list(GENERAL_POINTS) == ["before_epoch", "after_epoch", "before_iter", "after_iter"]


def test_the_docstrings_picture_has_every_mount_point_in_the_order_of_a_run() -> None:
    picture = (hook_module.__doc__ or "").split("::", 1)[1].split("At each mount point")[0]
    drawn = [name for name in re.findall(r"^[ │]*(\w+)", picture, re.M) if name in MOUNT_POINTS]
    test_points = [point for point in MOUNT_POINTS if "_test" in point]
    assert drawn == [point for point in MOUNT_POINTS if point not in test_points[1:]]  # drawn as one line


# The general points. -------------------------------------------------------------------------------------------------


class General(Hook):
    """Records the calls at the general points and at one specific point."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Mode]] = []
        self.batches: list[tuple[Mode, int, int]] = []

    def before_epoch(self, engine: Engine, mode: Mode) -> None:
        self.calls.append(("before_epoch", mode))

    def after_epoch(self, engine: Engine, mode: Mode) -> None:
        self.calls.append(("after_epoch", mode))

    def before_iter(self, engine: Engine, batch_idx: int, batch: Any, mode: Mode) -> None:
        self.calls.append(("before_iter", mode))
        self.batches.append((mode, batch_idx, len(batch[0])))

    def after_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Any, mode: Mode) -> None:
        self.calls.append(("after_iter", mode))
        assert outputs["loss"].ndim == 0

    def before_val_epoch(self, engine: Engine) -> None:
        self.calls.append(("before_val_epoch", "val"))


def test_general_points_are_called_at_the_train_val_and_test_points_with_the_mode(tmp_path: Path) -> None:
    hook = General()
    make_engine(tmp_path, {"general": hook}, train=batches(2), val=batches(1, 2), test=batches(1, 3)).train()
    assert hook.calls == [
        ("before_epoch", "train"),
        ("before_iter", "train"),
        ("after_iter", "train"),
        ("before_iter", "train"),
        ("after_iter", "train"),
        ("after_epoch", "train"),
        ("before_epoch", "val"),
        ("before_val_epoch", "val"),  # both are called, the general one first
        ("before_iter", "val"),
        ("after_iter", "val"),
        ("after_epoch", "val"),
        ("before_epoch", "test"),
        ("before_iter", "test"),
        ("after_iter", "test"),
        ("after_epoch", "test"),
    ]
    assert hook.batches == [("train", 0, 4), ("train", 1, 4), ("val", 0, 2), ("test", 0, 3)]


# The helpers. --------------------------------------------------------------------------------------------------------


class AsThere(Hook):
    """Compares the helpers with mmengine 0.10's formulas, whose counters are still those before the iteration."""

    def __init__(self) -> None:
        self.compared = 0
        self.ends: list[tuple[Mode, int]] = []

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Any) -> None:
        done = engine.progress.iteration - 1  # their runner.iter here
        for n in (1, 2, 3, 5):
            for start in (0, 2, 3, 4):
                theirs = (done + 1 - start) % n == 0 if done + 1 - start >= 0 else False
                assert self.every_n_train_iters(engine, n, start) == self.every_n_iters(engine, n, start) == theirs
                self.compared += 1
        assert self.end_of_epoch(engine, batch_idx) == (batch_idx + 1 == len(engine.loaders.train or ()))
        assert self.is_last_train_iter(engine) == (done + 1 == engine.max_iters)
        assert self.is_last_train_epoch(engine) == (engine.progress.epoch + 1 == engine.max_epochs)

    def after_train_epoch(self, engine: Engine) -> None:
        done = engine.progress.epoch - 1  # their runner.epoch here
        for n in (1, 2, 3):
            for start in (0, 2, 3):
                theirs = (done + 1 - start) % n == 0 if done + 1 - start >= 0 else False
                assert self.every_n_epochs(engine, n, start) == theirs
        assert self.is_last_train_epoch(engine) == (done + 1 == engine.max_epochs)

    def after_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Any, mode: Mode) -> None:
        if self.end_of_epoch(engine, batch_idx, mode):
            self.ends.append((mode, batch_idx))


def test_the_helpers_answer_as_mmengines_do(tmp_path: Path) -> None:
    hook = AsThere()
    loaders = {"train": batches(5), "val": batches(2), "test": batches(4)}
    make_engine(tmp_path, {"as_there": hook}, **loaders, max_epochs=4).train()
    assert hook.compared == 20 * 16
    assert hook.ends == [("train", 4), ("val", 1)] * 4 + [("test", 3)]


@pytest.mark.parametrize(
    ("settings", "last"),
    [
        ({"max_epochs": 3}, 3),
        ({"max_iters": 7}, 3),
        ({"max_epochs": 3, "val_by_epoch": False, "val_interval": 2}, 3),
        ({"max_epochs": 3, "accumulate": 2}, 3),
    ],
    ids=str,
)
def test_the_last_epoch_is_the_last_throughout(tmp_path: Path, settings: dict[str, Any], last: int) -> None:
    yes, no = set[tuple[str, int]](), set[tuple[str, int]]()

    def noting(point: str) -> Hook:
        def note(engine: Engine) -> None:
            inside = point not in ("after_train_epoch", "before_val")
            epoch = (engine.progress.epoch + 1) if inside else -(-engine.progress.iteration // 3)
            (yes if hook.is_last_train_epoch(engine) else no).add((point, epoch))

        hook = at(point, note, nth=0)
        return hook

    points = ("before_train_epoch", "before_train_iter", "after_train_iter", "after_train_epoch", "before_val")
    hooks = {point: noting(point) for point in points}
    make_engine(tmp_path, hooks, train=batches(3), val=batches(1), **settings).train()
    assert {epoch for _, epoch in yes} == {last}
    assert {epoch for _, epoch in no} == set(range(1, last))
    whole = settings.get("max_iters", 9) % 3 == 0
    assert {point for point, _ in yes} == {point for point in points if whole or point != "after_train_epoch"}
