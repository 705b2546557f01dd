"""From a run to a checkpoint and back: everything is in it, and nothing that is missing or left over goes unnoticed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.errors import UserError
from hydraloop.hooks.checkpoint import CheckpointHook
from hydraloop.hooks.ema import EMAHook
from hydraloop.tasks.task import Task
from tests.helpers import Recorder, at, batches, differences, make_engine
from tests.hooks.tiny_runs import engine_of, model


class Counting(Hook):
    """A hook with state: the iterations it saw."""

    def __init__(self) -> None:
        self.seen = 0

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Any) -> None:
        self.seen += 1

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def _saving() -> Hook:
    return at("after_train_epoch", lambda engine: engine.request_checkpoint("a"))


def _checkpoint(run_dir: Path, hooks: dict[str, Hook] | None = None, **options: Any) -> Path:
    """The file of a run of one epoch."""
    make_engine(run_dir, {**(hooks or {}), "saving": _saving()}, **options).train()
    return run_dir / "checkpoints" / "a.pth"


def _changed(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    checkpoint = torch.load(path, weights_only=True)
    change(checkpoint)
    torch.save(checkpoint, path)
    return path


def test_a_checkpoint_has_everything_and_can_be_loaded_without_pickle(tmp_path: Path) -> None:
    path = _checkpoint(tmp_path, {"counting": Counting()}, val=batches(1), metadata={"experiment_name": "mine"})
    checkpoint = torch.load(path, weights_only=True)
    assert set(checkpoint) == {
        "format", "meta", "state_dict", "optimizer", "schedulers", "hooks", "precision", "rng", "progress",
    }  # fmt: skip
    assert set(checkpoint["state_dict"]) == {"weight", "bias"}, "the model's, not the task's"
    assert checkpoint["hooks"] == {"counting": {"seen": 2}}, "hooks without a state are not in it"
    assert checkpoint["meta"]["experiment_name"] == "mine"
    assert checkpoint["meta"]["metric_names"] == ["loss"]
    assert (checkpoint["meta"]["epoch"], checkpoint["meta"]["iteration"]) == (1, 2)
    assert checkpoint["meta"]["versions"]["torch"] == torch.__version__


def test_before_save_checkpoint_can_add_metadata(tmp_path: Path) -> None:
    class Adding(Hook):
        def before_save_checkpoint(self, engine: Engine, checkpoint: dict[str, Any]) -> None:
            checkpoint["meta"]["note"] = "from a hook"

    path = _checkpoint(tmp_path, {"adding": Adding()})
    assert torch.load(path, weights_only=True)["meta"]["note"] == "from a hook"


def test_after_load_checkpoint_comes_when_everything_is_loaded(tmp_path: Path) -> None:
    path = _checkpoint(tmp_path, {"counting": Counting()})
    recorder, counting = Recorder(), Counting()
    seen: list[tuple[int, int]] = []
    look = at("after_load_checkpoint", lambda engine: seen.append((counting.seen, engine.progress.iteration)))
    hooks = {"look": look, "recorder": recorder, "counting": counting}
    make_engine(tmp_path, hooks, resume=path, max_epochs=2).train()
    assert seen == [(2, 2)]
    assert dict(recorder.arguments)["after_load_checkpoint"][0]["progress"]["iteration"] == 2
    assert counting.seen == 4


def test_the_last_validation_is_known_to_a_resumed_run(tmp_path: Path) -> None:
    saving = at("after_val", lambda engine: engine.request_checkpoint("validated"))
    first = make_engine(tmp_path, {"saving": saving}, val=batches(1))
    first.train()
    seen: list[dict[str, float]] = []
    look = at("before_train", lambda engine: seen.append(engine.metrics))
    path = tmp_path / "checkpoints" / "validated.pth"
    make_engine(tmp_path, {"look": look}, val=batches(1), resume=path, max_epochs=2).train()
    assert seen == [first.metrics]
    assert seen[0]["loss"] > 0


# Strict. -------------------------------------------------------------------------------------------------------------


def test_a_hook_whose_state_is_missing_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = _checkpoint(tmp_path)
    with pytest.raises(UserError, match="no state of it") as caught:
        make_engine(tmp_path, {"counting": Counting()}, resume=path).train()
    assert caught.value.key == "hooks.counting"
    assert "resume_strict=false" in str(caught.value)
    counting = Counting()
    with caplog.at_level(logging.WARNING):
        make_engine(tmp_path, {"counting": counting}, resume=path, max_epochs=2, resume_strict=False).train()
    assert counting.seen == 2, "it begins again"
    assert any("hooks.counting" in record.message for record in caplog.records)


def test_a_state_without_its_hook_is_named(tmp_path: Path) -> None:
    path = _checkpoint(tmp_path, {"counting": Counting()})
    with pytest.raises(UserError, match="but this run does not use it") as caught:
        make_engine(tmp_path, {"countin": Hook()}, resume=path).train()
    assert caught.value.key == "hooks.counting"
    assert "resume_strict=false" in str(caught.value)
    assert make_engine(tmp_path, resume=path, max_epochs=2, resume_strict=False).train().status == "finished"


@pytest.mark.parametrize("entry", ["optimizer", "schedulers"])
def test_a_checkpoint_saved_without_optimizer_or_schedules(tmp_path: Path, entry: str) -> None:
    path = _changed(_checkpoint(tmp_path), lambda checkpoint: checkpoint.pop(entry))
    with pytest.raises(UserError, match=f"has no {entry}") as caught:
        make_engine(tmp_path, resume=path).train()
    assert caught.value.key == "resume"
    assert "resume_strict=false" in str(caught.value)
    assert make_engine(tmp_path, resume=path, max_epochs=2, resume_strict=False).train().status == "finished"


@pytest.mark.parametrize("option", ["resume", "load_from"])
def test_another_model_is_refused_and_the_tensor_named(tmp_path: Path, option: str) -> None:
    path = _checkpoint(tmp_path)
    task = Task(nn.Sequential(nn.Linear(3, 1)), nn.MSELoss())
    with pytest.raises(UserError, match=r"0\.weight") as caught:
        make_engine(tmp_path, task=task, **{option: path}).train()
    assert caught.value.key == option
    assert "Sequential" in str(caught.value)
    assert "init.checkpoint=… init.mismatched=skip" in str(caught.value)


def _inside(tmp_path: Path, iteration: int) -> Path:
    """A checkpoint from inside an epoch of two batches."""
    inside = at("after_train_iter", lambda engine: engine.request_checkpoint("inside"), nth=iteration)
    return _checkpoint(tmp_path, {"inside": inside}, max_epochs=2).with_name("inside.pth")


@pytest.mark.parametrize("iteration", [1, 3])
def test_epochs_of_another_length_are_refused_inside_an_epoch(tmp_path: Path, iteration: int) -> None:
    with pytest.raises(UserError, match="inside an epoch of 2 batches") as caught:
        make_engine(tmp_path, train=batches(3), resume=_inside(tmp_path, iteration), max_epochs=2).train()
    assert caught.value.key == "data.train"
    assert "checkpoint from the end of an epoch" in str(caught.value)


def test_another_seed_is_refused_inside_an_epoch(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, resume=_inside(tmp_path, 3), max_epochs=2, seed=1)
    with pytest.raises(UserError, match="with the seed 0, whose samples had another order") as caught:
        engine.train()
    assert caught.value.key == "data.train"


def test_epochs_of_another_length_are_fine_at_an_epochs_end(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, train=batches(3), resume=_checkpoint(tmp_path), max_epochs=2)
    engine.train()
    assert (engine.progress.epoch, engine.progress.batch_in_epoch) == (2, 0)


# Weights alone. ------------------------------------------------------------------------------------------------------


def _files(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    path = _checkpoint(tmp_path / "from", {"ema": EMAHook(warmup=False, momentum=0.01)}, train=batches(9), lr=0.2)
    return path, torch.load(path, weights_only=True)


@pytest.fixture(autouse=True)
def _run_directories(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()


@pytest.mark.parametrize("weights", ["averaged", "raw"])
def test_load_from_takes_weights_and_nothing_else(tmp_path: Path, weights: str) -> None:
    path, checkpoint = _files(tmp_path)
    raw, averaged = checkpoint["state_dict"], checkpoint["hooks"]["ema"]["averaged"]
    assert list(differences(raw, averaged)), "the average is another one"
    seen: list[dict[str, Any]] = []

    def look(engine: Engine) -> None:
        assert engine.progress.iteration == 0
        seen.append({name: value.clone() for name, value in engine.model.state_dict().items()})

    make_engine(tmp_path, {"look": at("before_train", look)}, load_from=path, weights=weights).train()
    assert list(differences(seen[0], averaged if weights == "averaged" else raw)) == []


# Where a loader begins. ----------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux only")
def test_a_file_is_mapped_to_memory_while_it_is_loaded_and_not_after(tmp_path: Path) -> None:
    def mapped(engine: Engine) -> bool:
        return str(path) in Path("/proc/self/maps").read_text(encoding="utf-8")

    def run(hooks: dict[str, Hook], **settings: Any) -> None:
        net = model()
        adam = torch.optim.Adam(net.parameters())
        engine_of(
            tmp_path, {"ema": EMAHook(), "checkpoint": CheckpointHook(), **hooks}, net=net, optimizer=adam, **settings
        ).train()

    path = tmp_path / "checkpoints" / "epoch_1.pth"
    run({}, max_epochs=1)
    found: list[bool] = []
    hooks = {
        "loads": at("after_load_checkpoint", lambda engine: found.append(mapped(engine))),
        "trains": at("before_train_iter", lambda engine: found.append(mapped(engine))),
    }
    run(hooks, resume=path, max_epochs=2)
    assert found == [True, False]
