"""Requests of hooks, and when the engine acts: after all hooks of the mount point, between two windows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from tests.helpers import Recorder, at, batches, make_engine


def test_a_checkpoint_is_written_once_all_hooks_of_the_mount_point_ran(tmp_path: Path) -> None:
    trace: list[str] = []
    hooks: dict[str, Hook] = {
        "asking": at("after_train_iter", lambda engine: engine.request_checkpoint("mine"), priority=0),
        "last": Recorder(trace),
    }
    make_engine(tmp_path, hooks, train=batches(2)).train()
    index = trace.index("before_save_checkpoint")
    assert trace[index - 1 : index + 2] == ["after_train_iter 0", "before_save_checkpoint", "before_train_iter 1"]
    checkpoint = torch.load(tmp_path / "checkpoints" / "mine.pth", weights_only=True)
    assert checkpoint["progress"]["iteration"] == 1


def test_one_checkpoint_a_tag_written_by_its_own_writer(tmp_path: Path) -> None:
    written: list[tuple[str, int]] = []

    def ask(engine: Engine) -> None:
        engine.request_checkpoint("a", lambda engine: written.append(("a, forgotten", engine.progress.iteration)))
        engine.request_checkpoint("a", lambda engine: written.append(("a", engine.progress.iteration)))
        engine.request_checkpoint("b", lambda engine: written.append(("b", engine.progress.iteration)))

    make_engine(tmp_path, {"asking": at("after_train_iter", ask)}, train=batches(3)).train()
    assert written == [("a", 1), ("b", 1)]
    assert not (tmp_path / "checkpoints").exists()


def test_stopping_is_agreed_on_and_the_first_reason_stands(tmp_path: Path) -> None:
    def ask(engine: Engine) -> None:
        engine.request_stop("first")
        engine.request_stop("second")
        assert not engine.requests.stopping, "asking does not stop yet"

    engine = make_engine(tmp_path, {"asking": at("after_train_iter", ask)}, train=batches(9))
    result = engine.train()
    assert engine.requests.stopping
    assert (result.status, result.reason, engine.progress.iteration) == ("stopped", "first", 1)


@pytest.mark.parametrize("point", ["after_train_epoch", "after_val_epoch", "after_val"])
def test_a_stop_asked_for_at_an_epochs_end_begins_no_other_epoch(tmp_path: Path, point: str) -> None:
    hook = at(point, lambda engine: engine.request_stop("enough"))
    engine = make_engine(tmp_path, {"asking": hook}, val=batches(1), max_epochs=5)
    engine.train()
    assert engine.progress.epoch == 1
    assert engine.progress.last_validation == engine.progress.iteration == 2


def test_a_stop_asked_for_in_a_validation_inside_an_epoch_trains_no_further_window(tmp_path: Path) -> None:
    hook = at("after_val_epoch", lambda engine: engine.request_stop("enough"))
    engine = make_engine(
        tmp_path, {"asking": hook}, train=batches(8), val=batches(1), val_by_epoch=False, val_interval=2, accumulate=2
    )
    engine.train()
    assert engine.progress.iteration == 2


@pytest.mark.parametrize("point", ["before_run", "before_train"])
def test_a_stop_asked_for_before_the_first_iteration_trains_nothing(tmp_path: Path, point: str) -> None:
    hook = at(point, lambda engine: engine.request_stop("nothing to do"))
    engine = make_engine(tmp_path, {"asking": hook}, train=batches(8))
    result = engine.train()
    assert (result.status, engine.progress.iteration) == ("stopped", 0)


def test_a_request_at_after_train_is_acted_on_after_the_other_closing_hooks(tmp_path: Path) -> None:
    trace: list[str] = []
    hooks: dict[str, Hook] = {
        "asking": at("after_train", lambda engine: engine.request_checkpoint("last"), priority=0),
        "last": Recorder(trace),
    }
    make_engine(tmp_path, hooks, train=batches(1)).train()
    assert trace[-3:] == ["after_train", "before_save_checkpoint", "after_run"]
    assert (tmp_path / "checkpoints" / "last.pth").is_file()


def test_nothing_is_written_after_an_error(tmp_path: Path) -> None:
    def ask_and_fail(engine: Engine) -> None:
        engine.request_checkpoint("mine")
        raise RuntimeError("on purpose")

    hooks: dict[str, Hook] = {
        "failing": at("after_train_iter", ask_and_fail),
        "asking": at("after_train", lambda engine: engine.request_checkpoint("last")),
    }
    with pytest.raises(RuntimeError, match="on purpose"):
        make_engine(tmp_path, hooks).train()
    assert not (tmp_path / "checkpoints").exists()
