"""Asynchronous saves: the file has the state of its iteration, one at a time, and errors reach the run."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hydraloop.engine.checkpoint.saver import Saver
from hydraloop.engine.checkpoint.staging import Staging
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.hooks.checkpoint import CheckpointHook
from tests.hooks.tiny_runs import Stopper, engine_of

Checkpoint = dict[str, Any]


class Held:
    """Writes a checkpoint to a list, once it may."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.written: list[Checkpoint] = []
        self.settled: list[bool] = []

    def __call__(self, checkpoint: Checkpoint) -> bool:
        assert self.free.wait(60)
        self.written.append({name: value.clone() for name, value in checkpoint.items()})
        return True

    def start(self, saver: Saver, checkpoint: Checkpoint, *, asynchronous: bool = True) -> bool:
        return saver.start(checkpoint, self, self.settled.append, asynchronous=asynchronous)


def saver(limit: int | None = None) -> Saver:
    return Saver(Distributed(), lambda: None, limit)


def test_a_change_after_the_save_does_not_change_the_file() -> None:
    one, held, weight = saver(), Held(), torch.zeros(3)
    held.start(one, {"weight": weight})
    weight += 1
    assert held.settled == []
    held.free.set()
    assert one.wait()
    assert held.settled == [True]
    assert held.written[0]["weight"].tolist() == [0, 0, 0]
    assert one.wait(), "nothing is left to wait for"
    one.close()


def test_a_copy_that_needs_too_much_memory_is_not_made(caplog: pytest.LogCaptureFixture) -> None:
    one, held = saver(limit=100), Held()
    held.free.set()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            held.start(one, {"small": torch.zeros(10), "large": torch.zeros(20)})
            assert held.settled.pop(), "written at once"
        held.start(one, {"small": torch.zeros(10)})
        assert held.settled == [], "a thread writes it"
        one.close()
    (line,) = [record.getMessage() for record in caplog.records]
    assert "a quarter of the free memory, so training waits until checkpoints are written" in line


def test_a_copy_keeps_ties_strides_and_containers() -> None:
    staging, weight = Staging(), torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    state: OrderedDict[str, Any] = OrderedDict(first=weight, second=weight.view(2, 3, 4, 5), number=[1, ("a", None)])
    state._metadata = {"": {"version": 2}}  # type: ignore[attr-defined]  # as in a module's state dict
    copied = staging.copy({"state_dict": state, "sparse": torch.eye(2).to_sparse(), "meta": weight.to("meta")})
    assert copied is not None
    found = copied["state_dict"]
    assert found["first"] is found["second"]
    assert torch.equal(found["first"], weight)
    assert found["first"].data_ptr() != weight.data_ptr()
    assert found["first"].stride() == weight.stride()
    assert (found["number"], found._metadata) == (state["number"], {"": {"version": 2}})
    assert found["number"] is not state["number"]
    assert torch.equal(copied["sparse"].to_dense(), torch.eye(2))
    assert copied["meta"].is_meta


def test_tensors_share_few_allocations_but_no_storage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Pinning each tensor by itself would take a second for a thousand. A file has one record for each storage."""
    allocated: list[int] = []
    empty = torch.empty

    def counted(*size: int, **options: Any) -> Tensor:
        if "pin_memory" in options:
            allocated.append(*size)
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", counted)
    state = {
        **{str(number): torch.rand(3, 4) for number in range(20)},
        "transposed": torch.rand(4, 3).T,
        "slice": torch.rand(4, 3)[:, 1],
        "short": torch.rand(5).to(torch.bfloat16),
        "flag": torch.tensor(True),
        "empty": torch.empty(0, 2),
    }
    copied = Staging().copy(state)
    assert copied is not None
    assert len(allocated) == 3, "one for each type"
    assert all(torch.equal(copied[name], value) for name, value in state.items())
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in copied.values())
    assert copied["transposed"].stride() == (1, 3)
    torch.save(copied, tmp_path / "copied.pth")
    found = torch.load(tmp_path / "copied.pth")
    assert all(torch.equal(found[name], value) for name, value in state.items())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_copy_from_a_gpu_is_pinned_and_does_not_block() -> None:
    staging, weights = Staging(), {str(number): torch.rand(3, device="cuda") for number in range(20)}
    torch.cuda.set_sync_debug_mode("error")
    try:
        copied = staging.copy(weights)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    staging.wait()
    assert copied is not None
    assert all(copied[name].is_pinned() and copied[name].equal(value.cpu()) for name, value in weights.items())


# Whole runs. ---------------------------------------------------------------------------------------------------------


class SlowWriter(CheckpointHook):
    """Waits in the thread until `free` is set; `fails` instead of writing."""

    def __init__(self, fails: Exception | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.free, self.fails = threading.Event(), fails

    def before_run(self, engine: Engine) -> None:
        super().before_run(engine)
        start = engine.checkpoints._saver.start

        def held(checkpoint: Checkpoint, write: Callable[[Checkpoint], bool], *args: Any, **options: Any) -> bool:
            def later(copied: Checkpoint) -> bool:
                assert self.free.wait(60)
                if self.fails is not None:
                    raise self.fails
                return write(copied)

            return start(checkpoint, later, *args, **options)

        engine.checkpoints._saver.start = held  # type: ignore[method-assign]


class Freed(Hook):
    """Lets the thread write in an iteration."""

    def __init__(self, hook: SlowWriter, at: int) -> None:
        self.hook, self.at = hook, at

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        if engine.progress.iteration == self.at:
            self.hook.free.set()


def test_an_error_of_the_thread_ends_the_run_at_the_next_iteration(tmp_path: Path) -> None:
    hook = SlowWriter(ValueError("on purpose"), by_epoch=False, interval=5)
    hook.free.set()

    class Waits(Hook):
        def before_train_iter(self, engine: Engine, batch_idx: int, batch: Any) -> None:
            if engine.progress.iteration == 5:  # the next iteration begins when the thread has failed
                writing = engine.checkpoints._saver._writing
                assert writing is not None
                writing.result()

    engine = engine_of(tmp_path, {"waits": Waits(), "checkpoint": hook}, max_epochs=5)
    with pytest.raises(ValueError, match="on purpose"):
        engine.train()
    assert engine.progress.iteration == 6
    assert hook.state_dict()["last_saved"] == 0


def test_with_min_time_a_regular_save_does_not_wait_for_the_last_one(tmp_path: Path) -> None:
    hook = SlowWriter(min_time=1e-9)
    engine_of(tmp_path, {"freed": Freed(hook, at=9), "checkpoint": hook}, max_epochs=3).train()
    assert {path.stem for path in (tmp_path / "checkpoints").glob("*.pth")} == {"epoch_1", "epoch_3"}


def test_a_run_that_fails_finishes_its_save_first(tmp_path: Path) -> None:
    hook = SlowWriter(save_best="loss")
    hooks = {"stopper": Stopper(fail_at=7), "freed": Freed(hook, at=3), "checkpoint": hook}
    engine = engine_of(tmp_path, hooks)
    with pytest.raises(FloatingPointError):
        engine.train()
    assert {path.stem for path in (tmp_path / "checkpoints").glob("*.pth")} == {"epoch_1", "best_loss_epoch_1"}
    assert engine.best is not None
    assert Path(engine.best.checkpoint).stem == "best_loss_epoch_1"
