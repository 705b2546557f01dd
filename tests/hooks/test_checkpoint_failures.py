"""CheckpointHook when something fails: a file cannot be written, a kill during a save, a missing metric."""

from __future__ import annotations

import logging
import resource
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook, Priority
from hydraloop.errors import UserError
from hydraloop.files.result import Best
from hydraloop.hooks import checkpoint
from hydraloop.hooks.checkpoint import CheckpointHook
from hydraloop.tasks.task import Task
from tests.helpers import at
from tests.hooks.tiny_runs import Scripted, bits, engine_of, load, model, same


def stems(run_dir: Path) -> set[str]:
    return {path.stem for path in (run_dir / "checkpoints").glob("*.pth") if path.is_file()}


def in_the_way(run_dir: Path, name: str) -> Path:
    """A folder that is not empty, at the path of a file to write."""
    folder = run_dir / "checkpoints" / name
    (folder / "something").mkdir(parents=True)
    return folder


def thread_ended(engine: Engine) -> None:
    """Wait until the thread of a save has ended. Only an exchange between the ranks then ends the save."""
    writing = engine.checkpoints._saver._writing
    if writing is not None:
        writing.result()


class AtVal(Hook):
    """Does something after each validation, once the epoch's checkpoint is written or has failed."""

    def __init__(self, does: Callable[[], Any]) -> None:
        self.does = does

    def after_val_epoch(self, engine: Engine, metrics: Mapping[str, float]) -> None:
        engine.checkpoints.wait_for_save()
        self.does()


# A file that cannot be written; the run continues. -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "regular"), [({"max_keep_ckpts": 1}, {"epoch_3"}), ({"interval": None, "save_last": False}, set())]
)
def test_a_best_validation_that_could_not_be_written_has_no_file(
    tmp_path: Path, options: dict[str, Any], regular: set[str]
) -> None:
    """Also if no later save waits for the thread before the next validation is compared."""
    in_the_way(tmp_path, "best_acc_epoch_2.pth")
    hooks = {
        "ended": at("before_train_iter", thread_ended, nth=0),
        "checkpoint": CheckpointHook(save_best="acc", **options),
    }
    metrics = {"acc": Scripted([0.1, 0.5, 0.3, 0.0])}
    engine = engine_of(tmp_path, hooks, metrics=metrics, test=True)
    assert engine.train().status == "finished"
    assert stems(tmp_path) == {"best_acc_epoch_3", *regular}, "better than the first one"
    assert engine.best == Best("acc", 0.5, 8)


def test_a_complete_file_of_a_failed_save_is_deleted_later(tmp_path: Path) -> None:
    """The first file of two best ones is written, its second name is not."""
    in_the_way(tmp_path, "best_err_epoch_2.pth")
    hook = CheckpointHook(save_best=["acc", "err"], rule=["greater", "less"], interval=None, save_last=False)
    metrics = {"acc": Scripted([0.1, 0.5, 0.6]), "err": Scripted([3, 2, 1])}
    assert engine_of(tmp_path, {"checkpoint": hook}, metrics=metrics).train().status == "finished"
    assert stems(tmp_path) == {"best_acc_epoch_3", "best_err_epoch_3"}


def test_a_file_that_cannot_be_deleted_keeps_no_other_file_and_is_deleted_later(tmp_path: Path) -> None:
    engine_of(tmp_path, {"checkpoint": CheckpointHook()}).train()
    folder = tmp_path / "checkpoints"
    (folder / "epoch_1.pth").unlink()
    blocked, found = in_the_way(tmp_path, "epoch_1.pth"), []

    def free(engine: Engine) -> None:
        engine.checkpoints.wait_for_save()
        found.append(stems(tmp_path))
        shutil.rmtree(blocked)
        blocked.touch()

    hooks = {"checkpoint": CheckpointHook(max_keep_ckpts=1), "free": at("before_train_epoch", free, nth=2)}
    engine_of(tmp_path, hooks, max_epochs=5, resume=folder / "epoch_3.pth").train()
    assert found == [{"epoch_4"}]
    assert stems(tmp_path) == {"epoch_5"}


def test_after_a_failed_save_the_next_regular_one_does_not_wait_for_min_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_the_way(tmp_path, "epoch_4.pth")
    hooks = {"ended": at("before_train_iter", thread_ended, nth=0), "checkpoint": CheckpointHook(min_time="10s")}
    engine = engine_of(tmp_path, hooks, max_epochs=9)
    monkeypatch.setattr(checkpoint, "perf_counter", lambda: 4.0 * engine.progress.epoch)  # epochs of 4 s
    engine.train()
    assert stems(tmp_path) == {"epoch_1", "epoch_5", "epoch_8", "epoch_9"}


def test_a_last_epoch_that_could_not_be_written_is_written_after_training(tmp_path: Path) -> None:
    folder = in_the_way(tmp_path, "epoch_3.pth")
    freed = AtVal(lambda: folder.is_dir() and folder.rename(tmp_path / "free"))
    # Free again after the third epoch's file has failed, since an epoch's file is written before its validation.
    hooks = {"freed": freed, "checkpoint": CheckpointHook(max_keep_ckpts=2, interval=2)}
    engine_of(tmp_path, hooks, val_begin=3).train()
    assert stems(tmp_path) == {"epoch_2", "epoch_3"}
    assert load(tmp_path / "checkpoints" / "epoch_3.pth")["hooks"]["checkpoint"]["last_saved"] == 12
    assert (tmp_path / "checkpoints" / "last_checkpoint").read_text() == "epoch_3.pth\n"


def test_a_regular_file_that_could_not_be_written_is_none_of_those_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    in_the_way(tmp_path, "epoch_2.pth")
    with caplog.at_level(logging.WARNING):
        assert engine_of(tmp_path, {"checkpoint": CheckpointHook(max_keep_ckpts=2)}).train().status == "finished"
    assert stems(tmp_path) == {"epoch_1", "epoch_3"}
    (line,) = caplog.messages
    folder = tmp_path / "checkpoints"
    assert line == (
        f"{folder / 'epoch_2.pth'} could not be written: Is a directory; the last checkpoint is "
        f"{folder / 'epoch_1.pth'}. Training continues, and the next save is tried."
    )


def test_a_run_whose_last_checkpoint_could_not_be_written_has_failed(tmp_path: Path) -> None:
    path = in_the_way(tmp_path, "epoch_3.pth")
    engine = engine_of(tmp_path, {"checkpoint": CheckpointHook()})
    with pytest.raises(UserError, match=r"epoch_3\.pth could not be written: the end of training is lost") as caught:
        engine.train()
    assert str(path) in caught.value.problem
    assert engine.outcome.result is not None
    assert engine.outcome.result.status == "failed"


def test_a_full_disk_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Files cannot grow beyond 1500 bytes during the second and third epochs, and while files are published."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    class Disk(Hook):
        priority = Priority.LOWEST

        def before_train_epoch(self, engine: Engine) -> None:
            engine.checkpoints.wait_for_save()
            size = before[0] if engine.progress.epoch in (0, 3) else 1500
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

        def after_train(self, engine: Engine) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1500, before[1]))

    hooks = {"checkpoint": CheckpointHook(published_keys=["state_dict"], save_best="acc"), "disk": Disk()}
    metrics = {"acc": Scripted([0.1, 0.5, 0.4, 0.2])}
    try:
        with caplog.at_level(logging.WARNING):
            engine = engine_of(tmp_path, hooks, metrics=metrics, max_epochs=4)
            result = engine.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert result.status == "finished"
    assert stems(tmp_path) == {"epoch_1", "epoch_4", "best_acc_epoch_4"}
    assert not list(tmp_path.glob("checkpoints/.*"))
    folder = tmp_path / "checkpoints"
    failed = ["epoch_2", "best_acc_epoch_2", "epoch_3", "best_acc_epoch_3"]
    assert [line.partition(" could not be written: File too large; ")[0] for line in caplog.messages] == [
        *(str(folder / f"{name}.pth") for name in failed),
        f"{folder / 'epoch_4.pth'} is complete, but could not be published: File too large",
        f"{folder / 'best_acc_epoch_4.pth'} is complete, but could not be published: File too large",
    ]


# Killed while a file is written. -------------------------------------------------------------------------------------


class Killer(Hook):
    """Ends the run instead of writing a file."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.seen = 0

    def before_save_checkpoint(self, engine: Engine, checkpoint: dict[str, Any]) -> None:
        self.seen += 1
        if self.seen == self.at:
            raise KeyboardInterrupt


def test_a_run_that_is_killed_after_a_better_validation_repeats_it_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hooks = {"killer": Killer(at=5), "checkpoint": CheckpointHook(save_best="acc")}
    with pytest.raises(KeyboardInterrupt):
        engine_of(tmp_path, hooks, metrics={"acc": Scripted([0.1, 0.8])}).train()
    assert stems(tmp_path) == {"epoch_1", "epoch_2", "best_acc_epoch_2"}
    resume = tmp_path / "checkpoints" / "epoch_2.pth"
    again = {"checkpoint": CheckpointHook(save_best="acc")}
    engine = engine_of(tmp_path, again, metrics={"acc": Scripted([0.8, 0.2])}, resume=resume)
    engine.train()
    assert (engine.best.value, engine.best.iteration) == (0.8, 8)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_result_of_an_earlier_attempt_is_removed_when_a_resumed_run_has_trained(tmp_path: Path) -> None:
    """If the run is killed, `result.json` must not say that it has finished. A full disk is a warning."""
    engine_of(tmp_path, {"checkpoint": CheckpointHook()}, max_epochs=1).train()
    resume, there = tmp_path / "checkpoints" / "epoch_1.pth", []
    (tmp_path / "checkpoints" / "last_checkpoint").unlink()
    blocked = in_the_way(tmp_path, "last_checkpoint")

    def look(engine: Engine) -> None:
        there.append((tmp_path / "result.json").exists())
        if len(there) == 4:
            shutil.rmtree(blocked)

    found = {"checkpoint": CheckpointHook(), "look": at("before_train_iter", look, nth=0)}
    engine_of(tmp_path, found, max_epochs=2, resume=resume).train()
    assert there == [True, False, False, False]
    assert (tmp_path / "checkpoints" / "last_checkpoint").read_text() == "epoch_2.pth\n"
    assert (tmp_path / "result.json").exists()


# A metric left out. --------------------------------------------------------------------------------------------------


class LeavesOut(Task):
    """Has no accuracy in its second validation."""

    validations = 0

    def compute_metrics(self, *args: Any, **options: Any) -> dict[str, float]:
        metrics = super().compute_metrics(*args, **options)
        self.validations += 1
        if self.validations == 2:
            del metrics["acc"]
        return metrics


def test_a_validation_without_the_metric_is_not_the_best(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net, metrics = model(), {"acc": Scripted([0.1, 0.9, 0.2]), "err": Scripted([3, 2, 9])}
    hooks = {"checkpoint": CheckpointHook(save_best=["acc", "err"], rule=["greater", "less"], interval=None)}
    engine = engine_of(tmp_path, hooks, task=LeavesOut(net, nn.functional.mse_loss, metrics))
    with caplog.at_level(logging.WARNING):
        assert engine.train().status == "finished"
    assert stems(tmp_path) == {"best_acc_epoch_3", "best_err_epoch_2", "epoch_3"}
    (line,) = [record.getMessage() for record in caplog.records if "acc" in record.getMessage()]
    assert line.startswith("hooks.checkpoint: the validation did not report acc, so it cannot be the best")
    assert same(bits(net), load(tmp_path / "checkpoints" / "epoch_3.pth")["state_dict"])
