"""The own state of a task (a queue, a teacher) in checkpoints, on resume, and in a test of another checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.run_parts import Settings
from hydraloop.errors import UserError
from hydraloop.hooks.ema import EMAHook
from hydraloop.tasks.task import Task
from tests.helpers import EngineWithNeededHooks, at, batches, differences
from tests.ranks import on_ranks


class Distilled(Task):
    """Learns from an average of itself and from a queue of its outputs; the loss has weights, too."""

    queue: Tensor

    def __init__(self, length: int = 6) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), nn.HuberLoss())
        self.teacher = deepcopy(self.model).requires_grad_(False).eval()
        self.register_buffer("queue", torch.zeros(length, 1))
        self.head = self.model[2]  # type: ignore[index]  # also in the model

    def forward(self, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        outputs = self.model(inputs)
        loss = self.loss(outputs, targets + self.teacher(inputs) - self.queue.mean())
        if self.training:
            self.queue.copy_(torch.cat([outputs.detach(), self.queue])[: len(self.queue)])
            with torch.no_grad():
                for mine, own in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
                    mine.lerp_(own, 0.3)
        return {"loss": loss}


OWN = {"queue", *(f"teacher.{name}" for name in Distilled().model.state_dict())}


def engine_of(
    run_dir: Path, task: Task | None = None, *, distributed: Distributed | None = None, **settings: Any
) -> Engine:
    """An engine that saves `epoch_1.pth`, `epoch_2.pth`, …"""
    task = Distilled() if task is None else task

    def save(engine: Engine) -> None:
        engine.request_checkpoint(f"epoch_{engine.progress.epoch}", agreed=True)

    return EngineWithNeededHooks(
        task=task,
        optimizer=torch.optim.SGD(task.model.parameters(), lr=0.1, momentum=0.9),
        loaders=Loaders(batches(3), None, batches(2, seed=1)),
        hooks={"save": at("after_train_epoch", save, nth=0), "ema": EMAHook(warmup=False, momentum=0.1)},
        settings=Settings(**{"device": "cpu", "max_epochs": 3, "test": False, "accumulate": 2, **settings}),
        run_dir=run_dir,
        distributed=distributed,
    )


def content(path: Path) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(path, weights_only=True)
    del checkpoint["meta"]["time"], checkpoint["meta"]["seconds"]
    return checkpoint


def resumed_equals_whole(run_dir: Path, distributed: Distributed | None = None) -> list[str]:
    """Return how the last checkpoint of a run that was cut after an epoch differs from that of one that was not."""
    whole, cut = run_dir / "whole", run_dir / "cut"
    for folder in (whole, cut):
        folder.mkdir(exist_ok=True)
    engine_of(whole, distributed=distributed).train()
    engine_of(cut, resume=whole / "checkpoints" / "epoch_1.pth", distributed=distributed).train()
    first, expected, found = (
        content(folder / "checkpoints" / f"epoch_{epoch}.pth") for folder, epoch in ((whole, 1), (whole, 3), (cut, 3))
    )
    assert set(expected["task"]) == OWN
    assert [*differences(first["task"], expected["task"])], "training changes it"
    return [*differences(found, expected)]


def test_a_run_that_was_cut_ends_with_the_same_bits(tmp_path: Path) -> None:
    assert resumed_equals_whole(tmp_path) == []


def on_a_rank(distributed: Distributed, run_dir: str) -> list[str]:
    return resumed_equals_whole(Path(run_dir), distributed)


@pytest.mark.slow
def test_a_run_on_two_ranks_that_was_cut_ends_with_the_same_bits(tmp_path: Path) -> None:
    assert on_ranks(2, on_a_rank, str(tmp_path)) == [[], []]


def test_a_test_of_another_checkpoint_uses_the_state_in_it(tmp_path: Path) -> None:
    first = engine_of(tmp_path, max_epochs=1, test=True)
    first.train()
    engine = engine_of(tmp_path)
    engine.train()
    before = deepcopy(engine.task.state_dict())
    assert engine.test() != first.evaluator.test_metrics, "training changes the result"
    for _ in range(2):
        assert engine.test(tmp_path / "checkpoints" / "epoch_1.pth") == first.evaluator.test_metrics
    assert [*differences(before, engine.task.state_dict())] == [], "given back"


def test_a_task_that_holds_a_part_of_the_model_has_no_own_state(tmp_path: Path) -> None:
    """Otherwise raw weights would replace the averaged ones in a test."""

    class Sharing(Task):
        def __init__(self) -> None:
            super().__init__(nn.Sequential(nn.Linear(3, 1)), nn.MSELoss())
            self.layer = self.model[0]  # type: ignore[index]

    engine = engine_of(tmp_path, Sharing(), max_epochs=1, test=True)
    engine.train()
    path = tmp_path / "checkpoints" / "epoch_1.pth"
    assert "task" not in content(path)
    assert engine.test(path) == engine.evaluator.test_metrics


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    checkpoint = torch.load(path, weights_only=True)
    change(checkpoint)
    torch.save(checkpoint, path)
    return path


def test_a_file_without_it_is_resumed_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine_of(tmp_path, max_epochs=1).train()
    path = changed(tmp_path / "checkpoints" / "epoch_1.pth", lambda checkpoint: checkpoint.pop("task"))
    with caplog.at_level(logging.WARNING):
        engine_of(tmp_path, resume=path).train()
    assert "task: the checkpoint has no state of queue, teacher.0.weight, teacher.0.bias; it stays" in caplog.text


@pytest.mark.parametrize(
    ("change", "key", "problem"),
    [
        (lambda task: task.pop("queue"), "task.queue", "the checkpoint has no state of it"),
        (lambda task: task.update(bank=torch.ones(1)), "task.bank", "but this run does not use it"),
    ],
)
def test_other_entries_are_named(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], key: str, problem: str
) -> None:
    engine_of(tmp_path, max_epochs=1).train()
    path = changed(tmp_path / "checkpoints" / "epoch_1.pth", lambda checkpoint: change(checkpoint["task"]))
    with pytest.raises(UserError, match=problem) as caught:
        engine_of(tmp_path, resume=path).train()
    assert caught.value.key == key
    assert engine_of(tmp_path, resume=path, resume_strict=False).train().status == "finished"


def test_another_length_of_the_queue_is_refused(tmp_path: Path) -> None:
    engine_of(tmp_path, max_epochs=1).train()
    with pytest.raises(RuntimeError, match="size mismatch for queue"):
        engine_of(tmp_path, Distilled(length=8), resume=tmp_path / "checkpoints" / "epoch_1.pth").train()
