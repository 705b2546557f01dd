"""Requests at each moment, and an engine that is used more than once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.errors import UserError
from hydraloop.hooks import CheckpointHook, EMAHook, ParamSchedulerHook
from hydraloop.optim import MultiStep, Schedule
from tests.helpers import Recorder, at, batches, failing, make_engine, tiny_task


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


def test_a_schedule_steps_once_after_a_validation_on_its_own(tmp_path: Path) -> None:
    task = tiny_task()
    optimizer = torch.optim.SGD(task.parameters(), lr=1.0)
    engine = make_engine(
        tmp_path,
        {"param_scheduler": ParamSchedulerHook()},
        train=batches(5),
        val=batches(2),
        task=task,
        optimizer=optimizer,
        schedules={"it": Schedule("it", MultiStep([5, 10], gamma=0.5), optimizer)},
        max_epochs=2,
    )
    engine.validate()
    engine.train()
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_the_average_is_still_there_for_a_test_after_training(tmp_path: Path) -> None:
    ema = EMAHook()
    engine = make_engine(tmp_path, {"ema": ema}, test=batches(2, seed=5))
    engine.train()
    updates = ema.updates
    assert engine.test() == engine.test() == engine.evaluator.test_metrics
    assert ema.updates == updates


def test_a_test_after_training_has_the_trained_weights_not_those_loaded_at_first(tmp_path: Path) -> None:
    make_engine(tmp_path, {"checkpoint": CheckpointHook()}).train()
    file = tmp_path / "checkpoints" / "epoch_1.pth"
    engine = make_engine(tmp_path, test=batches(2, seed=5), load_from=file, max_epochs=3, lr=0.1)
    engine.train()
    trained = engine.model.weight.clone()  # type: ignore[operator,union-attr]
    assert engine.test() == engine.evaluator.test_metrics
    assert torch.equal(engine.model.weight, trained)  # type: ignore[arg-type]


def test_a_second_use_forgets_the_error_of_the_first(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, {"failing": failing("before_train", nth=1)})
    with pytest.raises(RuntimeError, match="on purpose"):
        engine.train()
    assert engine.train().status == "finished"
    assert engine.error is None


def test_a_second_use_forgets_that_the_first_was_stopped(tmp_path: Path) -> None:
    stop = at("after_train_iter", lambda engine: engine.request_stop("told to"))
    engine = make_engine(tmp_path, {"stop": stop}, max_epochs=3)
    assert (engine.train().status, engine.progress.iteration) == ("stopped", 1)
    result = engine.train()
    assert (result.status, result.reason, engine.progress.iteration) == ("finished", None, 6)


def test_a_checkpoint_asked_for_after_the_test_is_written(tmp_path: Path) -> None:
    hook = at("after_test", lambda engine: engine.request_checkpoint("tested"))
    make_engine(tmp_path, {"hook": hook}, test=batches(1)).train()
    assert (tmp_path / "checkpoints" / "tested.pth").exists()


def test_a_request_made_while_a_checkpoint_is_written_waits(tmp_path: Path) -> None:
    asked: list[int] = []

    def again(engine: Engine) -> None:
        asked.append(1)
        assert len(asked) < 20, "it asks without end"
        engine.request_checkpoint(f"number_{len(asked)}")

    hooks: dict[str, Hook] = {
        "first": at("after_train_iter", lambda engine: engine.request_checkpoint("first")),
        "again": at("before_save_checkpoint", lambda engine, *_: again(engine), nth=0),
    }
    make_engine(tmp_path, hooks).train()
    assert len(asked) < 6


def test_a_tag_with_a_path_in_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must not contain a folder"):
        make_engine(tmp_path).request_checkpoint("../elsewhere")


def test_writing_follows_the_owners_on_error_and_counts_as_its_time(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    blocked = tmp_path / "checkpoints" / "epoch_1.pth"
    blocked.mkdir()  # a folder, which a file cannot replace

    class Forgiving(CheckpointHook):
        on_error = "warn"

    engine = make_engine(tmp_path, {"checkpoint": Forgiving()}, max_epochs=2)
    assert engine.train().status == "finished"
    assert (tmp_path / "checkpoints" / "epoch_2.pth").is_file()
    assert engine.calls.seconds["checkpoint"][0] > 0


def test_a_state_that_fails_follows_on_error(tmp_path: Path) -> None:
    class Broken(Hook):
        on_error = "warn"

        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("no state")

    engine = make_engine(tmp_path, {"broken": Broken(), "checkpoint": CheckpointHook()})
    assert engine.train().status == "finished"
    saved = torch.load(tmp_path / "checkpoints" / "epoch_1.pth", weights_only=True)
    assert set(saved["hooks"]) == {"checkpoint"}


@pytest.mark.parametrize("what", ["validate", "test"])
def test_evaluating_without_data_is_refused(tmp_path: Path, what: str) -> None:
    with pytest.raises(UserError, match="there is no data set"):
        getattr(make_engine(tmp_path), what)()
