"""The golden trace: every mount point of a run, in order. `hook.py`'s docstring draws the same picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import MOUNT_POINTS, Hook
from hydraloop.hooks.checkpoint import CheckpointHook
from hydraloop.hooks.logger import LoggerHook
from tests.helpers import Recorder, at, batches, failing, make_engine

_EPOCH = [
    "before_train_epoch",
    "before_train_iter 0",
    "after_backward 0",
    "before_optimizer_step 0",
    "after_train_iter 0",
    "on_log",
    "before_train_iter 1",
    "after_backward 1",
    "before_optimizer_step 1",
    "after_train_iter 1",
    "after_train_epoch",
    "on_log",
    "before_save_checkpoint",
    "before_val",
    "before_val_epoch",
    "before_val_iter 0",
    "after_val_iter 0",
    "after_val_epoch",
    "on_log",
    "after_val",
]
TWO_EPOCHS = [
    "before_run",
    "at_position",
    "before_train",
    *_EPOCH,
    *_EPOCH,
    "after_train",
    "before_test",
    "before_test_epoch",
    "before_test_iter 0",
    "after_test_iter 0",
    "after_test_epoch",
    "on_log",
    "after_test",
    "after_run",
]


def _iteration(batch_idx: int) -> list[str]:
    points = ["before_train_iter", "after_backward", "before_optimizer_step", "after_train_iter"]
    return [f"{point} {batch_idx}" for point in points]


START = ["before_run", "at_position", "before_train"]
RESUMED = ["before_run", "after_load_checkpoint", "at_position", "before_train"]
VAL = ["before_val", "before_val_epoch", "before_val_iter 0", "after_val_iter 0", "after_val_epoch", "after_val"]
TEST = [point.replace("val", "test") for point in VAL]
ERROR = ["on_exception", "after_train", "after_run"]
UNTRAINED = ["on_exception", "after_run"]
END = ["after_run", "on_exception"]
EPOCH = ["before_train_epoch", *_iteration(0), *_iteration(1), "after_train_epoch"]


def _trace(run_dir: Path, hooks: dict[str, Hook] | None = None, *, raises: Any = None, **options: Any) -> list[str]:
    recorder = Recorder()
    options = {"train": batches(2), "val": batches(1), "test": batches(1), "max_epochs": 2, **options}
    engine = make_engine(run_dir, {"recorder": recorder, **(hooks or {})}, **options)
    if raises is None:
        engine.train()
    else:
        with pytest.raises(raises):
            engine.train()
    return recorder.trace


def test_two_epochs_with_validation_test_checkpoints_and_records(tmp_path: Path) -> None:
    assert _trace(tmp_path, {"logger": LoggerHook(interval=1), "checkpoint": CheckpointHook()}) == TWO_EPOCHS


def test_the_golden_trace_is_in_the_order_of_the_list_of_mount_points(tmp_path: Path) -> None:
    firsts = list(dict.fromkeys(entry.split()[0] for entry in TWO_EPOCHS))
    assert firsts == [point for point in MOUNT_POINTS if point not in ("after_load_checkpoint", "on_exception")]


def test_the_arguments_of_every_mount_point(tmp_path: Path) -> None:
    recorder = Recorder()
    train, val = batches(1, seed=1), batches(1, seed=2)
    hooks: dict[str, Hook] = {"recorder": recorder, "checkpoint": CheckpointHook(), "logger": LoggerHook(interval=1)}
    engine = make_engine(tmp_path, hooks, train=train, val=val, test=val)
    engine.train()
    arguments = dict(reversed(recorder.arguments))
    assert [point for point, given in arguments.items() if not given] == [
        point for point in arguments if point.split("_", 1)[1] in ("run", "train", "val", "test", "train_epoch")
        or point in ("at_position", "before_val_epoch", "before_test_epoch")
    ]  # fmt: skip
    for point in ("before_train_iter", "after_backward", "before_optimizer_step", "after_train_iter"):
        assert arguments[point][:2] == (0, train[0])
    for point in ("before_val_iter", "after_val_iter", "before_test_iter", "after_test_iter"):
        assert arguments[point][:2] == (0, val[0])
    for point in ("after_backward", "before_optimizer_step", "after_train_iter", "after_val_iter", "after_test_iter"):
        outputs = arguments[point][2]
        assert outputs["loss"].ndim == 0
        assert not outputs["loss"].requires_grad
    assert arguments["after_val_epoch"] == (engine.metrics,)
    assert arguments["after_test_epoch"] == (engine.evaluator.test_metrics,)
    assert arguments["before_save_checkpoint"][0]["progress"]["iteration"] == 1
    assert arguments["on_log"][0]["mode"] == "train"


def test_max_iters_cuts_the_last_epoch(tmp_path: Path) -> None:
    assert _trace(tmp_path, max_iters=3, max_epochs=99) == [
        *START,
        *EPOCH, *VAL,
        "before_train_epoch", *_iteration(0),  # cut: no after_train_epoch
        *VAL,
        "after_train", *TEST, "after_run",
    ]  # fmt: skip


def test_validation_by_iteration(tmp_path: Path) -> None:
    trace = _trace(tmp_path, train=batches(5), max_epochs=1, val_by_epoch=False, val_interval=2)
    assert trace == [
        *START, "before_train_epoch",
        *_iteration(0), *_iteration(1), *VAL,
        *_iteration(2), *_iteration(3), *VAL,
        *_iteration(4), "after_train_epoch", *VAL,  # the end
        "after_train", *TEST, "after_run",
    ]  # fmt: skip


def test_validation_by_iteration_at_an_epochs_end_comes_after_the_epoch(tmp_path: Path) -> None:
    trace = _trace(tmp_path, train=batches(2), max_epochs=2, val_by_epoch=False, val_interval=2, test=None)
    assert trace == [*START, *EPOCH, *VAL, *EPOCH, *VAL, "after_train", "after_run"]


# Errors. -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("point", "until"),
    [
        ("before_run", ["before_run", "on_exception", "after_run"]),
        (
            "before_train_iter",
            [*START, "before_train_epoch", "before_train_iter 0", *ERROR],
        ),
        (
            "after_val_iter",
            [*START, *EPOCH, *VAL[:4], *ERROR],
        ),
        (
            "after_train",
            [*START, *EPOCH, *VAL, *EPOCH, *VAL, "after_train", "on_exception", "after_run"],
        ),
        (
            "before_test_iter",
            [*START, *EPOCH, *VAL, *EPOCH, *VAL, "after_train", *TEST[:3], *UNTRAINED],
        ),
        (
            "after_run",
            [*START, *EPOCH, *VAL, *EPOCH, *VAL, "after_train", *TEST, *END],
        ),
    ],
)
def test_an_exception_in_a_phase(tmp_path: Path, point: str, until: list[str]) -> None:
    assert _trace(tmp_path, {"failing": failing(point)}, raises=RuntimeError) == until


def test_a_checkpoint_asked_for_at_an_epochs_last_batch_is_written_when_the_epoch_is_done(tmp_path: Path) -> None:
    asking = at("after_train_iter", lambda engine: engine.request_checkpoint("a"), nth=2)
    trace = _trace(tmp_path, {"asking": asking}, max_epochs=1, test=None)
    assert trace == [
        *START, *EPOCH, "before_save_checkpoint", *VAL, "after_train", "after_run",
    ]  # fmt: skip


# Stopping and resuming. ----------------------------------------------------------------------------------------------


def test_a_stop_inside_an_epoch_ends_with_validation_and_test(tmp_path: Path) -> None:
    stop = at("after_train_iter", lambda engine: engine.request_stop("enough"))
    assert _trace(tmp_path, {"stop": stop}) == [
        *START, "before_train_epoch", *_iteration(0), *VAL, "after_train", *TEST, "after_run",
    ]  # fmt: skip


def test_resumed_at_an_epochs_end_the_validation_is_made_up_first(tmp_path: Path) -> None:
    _trace(tmp_path, {"checkpoint": CheckpointHook()})
    trace = _trace(tmp_path, resume=tmp_path / "checkpoints" / "epoch_1.pth", resume_strict=False)
    assert trace == [
        *RESUMED, *VAL, *EPOCH, *VAL, "after_train", *TEST, "after_run",
    ]  # fmt: skip


def test_resumed_behind_its_validation_none_is_made_up(tmp_path: Path) -> None:
    _trace(tmp_path, {"asking": at("after_val", lambda engine: engine.request_checkpoint("validated"))})
    trace = _trace(tmp_path, resume=tmp_path / "checkpoints" / "validated.pth")
    assert trace[:5] == [*RESUMED, "before_train_epoch"]


def test_resumed_at_the_end_of_training_only_what_was_due_is_done(tmp_path: Path) -> None:
    _trace(tmp_path, {"checkpoint": CheckpointHook()})
    trace = _trace(tmp_path, resume=tmp_path / "checkpoints" / "epoch_2.pth", resume_strict=False)
    assert trace == [*RESUMED, *VAL, "after_train", *TEST, "after_run"]


def test_resumed_inside_an_epoch_the_epoch_begins_again_behind_its_batches(tmp_path: Path) -> None:
    asking = at("after_train_iter", lambda engine: engine.request_checkpoint("inside"), nth=3)
    _trace(tmp_path, {"asking": asking})
    flags: list[bool] = []

    def look(engine: Engine) -> None:
        flags.append(engine.progress.resumed_in_epoch)

    trace = _trace(
        tmp_path, {"look": at("before_train_epoch", look, nth=0)},
        resume=tmp_path / "checkpoints" / "inside.pth", max_epochs=3,
    )  # fmt: skip
    assert trace == [
        *RESUMED,
        "before_train_epoch", *_iteration(1), "after_train_epoch", *VAL,
        *EPOCH, *VAL,
        "after_train", *TEST, "after_run",
    ]  # fmt: skip
    assert flags == [True, False]


def test_weights_alone_are_loaded_before_training(tmp_path: Path) -> None:
    _trace(tmp_path, {"checkpoint": CheckpointHook()})
    trace = _trace(tmp_path, load_from=tmp_path / "checkpoints" / "epoch_1.pth", val=None, test=None)
    assert trace == [
        *RESUMED, *EPOCH, *EPOCH, "after_train", "after_run",
    ]  # fmt: skip


def test_validation_and_test_on_their_own(tmp_path: Path) -> None:
    for method, points in (("validate", VAL), ("test", TEST)):
        recorder = Recorder()
        engine = make_engine(tmp_path, {"recorder": recorder}, val=batches(1), test=batches(1))
        getattr(engine, method)()
        assert recorder.trace == ["before_run", *points, "after_run"]
    assert not (tmp_path / "result.json").exists(), "neither is the run's result"
