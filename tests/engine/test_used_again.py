"""An engine that is used more than once, resumed runs that are longer, and requests at unusual moments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.run import Settings
from hydraloop.errors import UserError
from hydraloop.hooks import CheckpointHook, EMAHook, ParamSchedulerHook
from hydraloop.optim import MultiStep, Schedule
from tests.helpers import EngineWithNeededHooks, at, batches, failing, make_engine, tiny_task


def test_a_schedule_steps_once_after_a_validation_on_its_own(tmp_path: Path) -> None:
    task = tiny_task()
    optimizer = torch.optim.SGD(task.parameters(), lr=1.0)
    engine = EngineWithNeededHooks(
        task=task,
        optimizer=optimizer,
        loaders=Loaders(batches(5), batches(2)),
        hooks={"param_scheduler": ParamSchedulerHook()},
        schedules={"it": Schedule("it", MultiStep([5, 10], gamma=0.5), optimizer)},
        settings=Settings(device="cpu", max_epochs=2),
        run_dir=tmp_path,
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
