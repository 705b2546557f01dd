"""Accumulation: a window of batches gives the gradients of one batch with all their samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.errors import UserError
from hydraloop.tasks import Task
from tests.helpers import Batch, at, batches, make_engine, tiny_task

UNEQUAL = [4, 4, 1, 3, 4, 2, 4, 2]
"""Samples of each batch: an unequal batch within a window, a short last window, a short last batch."""


def _unequal() -> list[Batch]:
    return [batch for seed, size in enumerate(UNEQUAL) for batch in batches(1, size, seed=seed)]


def _joined(window: list[Batch]) -> Batch:
    return torch.cat([inputs for inputs, _ in window]), torch.cat([targets for _, targets in window])


def _full_batch(windows: list[list[Batch]], epochs: int) -> tuple[nn.Module, list[list[Tensor]]]:
    """Weights and the gradients of each step of a hand-written loop over joined windows."""
    model = tiny_task().model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    gradients = []
    for _ in range(epochs):
        for window in windows:
            inputs, targets = _joined(window)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            gradients.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
            optimizer.step()
    return model, gradients


@pytest.mark.parametrize(
    ("accumulate", "sizes", "steps"),
    [
        (1, [1, 1, 1, 1, 1, 1, 1, 1], 8),
        (2, [2, 2, 2, 2], 4),
        (3, [3, 3, 2], 3),
        (5, [5, 3], 2),
        (99, [8], 1),
    ],
)
def test_gradients_and_weights_are_those_of_the_joined_windows(
    tmp_path: Path, accumulate: int, sizes: list[int], steps: int
) -> None:
    train, seen = _unequal(), []

    def look(engine: Engine) -> None:
        seen.append([parameter.grad.clone() for parameter in engine.model.parameters() if parameter.grad is not None])

    task = tiny_task()
    hooks: dict[str, Hook] = {"look": at("before_optimizer_step", look, nth=0)}
    optimizer = torch.optim.SGD(task.parameters(), lr=0.05, momentum=0.9)
    options = {"accumulate": accumulate, "max_epochs": 2}
    engine = make_engine(tmp_path, hooks, train=train, task=task, optimizer=optimizer, **options)
    engine.train()

    windows, rest = [], list(train)
    for size in sizes:
        windows.append(rest[:size])
        rest = rest[size:]
    assert not rest
    model, gradients = _full_batch(windows, epochs=2)
    assert len(seen) == len(gradients) == 2 * steps == engine.progress.optimizer_step
    for step, expected in zip(seen, gradients, strict=True):
        for one, other in zip(step, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    for one, other in zip(engine.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    assert engine.progress.samples == 2 * sum(UNEQUAL)


class Total(Task):
    """A task that leaves the mean to the engine."""

    def forward(self, batch: Batch) -> dict[str, Any]:
        inputs, targets = batch
        return {"loss": (nn.functional.mse_loss(self.model(inputs), targets, reduction="sum"), len(inputs))}


class Counted(Total):
    """A task that counts the terms of its loss before the forward pass."""

    def forward(self, batch: Batch) -> dict[str, Any]:
        return super().forward(batch)

    def count(self, batch: Batch) -> int:
        return len(batch[0])


@pytest.mark.parametrize("kind", [Task, Total, Counted])
@pytest.mark.parametrize("empty", [[0], [1], [2], [0, 1], [0, 1, 2, 3], []])
def test_batches_without_samples_count_for_nothing(tmp_path: Path, empty: list[int], kind: type[Task]) -> None:
    train = [batches(1, 0 if index in empty else 2 + index, seed=index)[0] for index in range(4)]
    task = kind(tiny_task().model, nn.MSELoss())
    engine = make_engine(tmp_path, train=train, task=task, accumulate=2, lr=0.05)
    engine.train()
    windows = [[batch for batch in window if len(batch[0])] for window in (train[:2], train[2:])]
    model = tiny_task().model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for inputs, targets in (_joined(window) for window in windows if window):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    assert engine.progress.samples == sum(len(inputs) for inputs, _ in train)
    for one, other in zip(engine.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_max_iters_closes_the_window(tmp_path: Path) -> None:
    train = batches(8)
    engine = make_engine(tmp_path, train=train, accumulate=3, max_iters=5, lr=0.05)
    engine.train()
    assert (engine.progress.iteration, engine.progress.optimizer_step) == (5, 2)
    assert engine.stepper.window_closed
    assert all(parameter.grad is None for parameter in engine.model.parameters())
    model = tiny_task().model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for window in (train[:3], train[3:5]):
        inputs, targets = _joined(window)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    for one, other in zip(engine.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_hooks_know_whether_the_optimizer_stepped(tmp_path: Path) -> None:
    seen: list[tuple[bool, bool]] = []
    look = at("after_train_iter", lambda engine: seen.append((engine.stepped, engine.stepper.window_closed)), nth=0)
    make_engine(tmp_path, {"look": look}, train=batches(5), accumulate=2).train()
    assert seen == [(False, False), (True, True), (False, False), (True, True), (True, True)]


def test_the_loss_that_hooks_see_is_the_batches_own(tmp_path: Path) -> None:
    train, losses = _unequal(), []

    class Losses(Hook):
        def after_train_iter(self, engine: Engine, batch_idx: int, batch: Batch, outputs: dict[str, Tensor]) -> None:
            losses.append(float(outputs["loss"]))

    make_engine(tmp_path, {"losses": Losses()}, train=train, accumulate=99).train()
    model = tiny_task().model
    with torch.no_grad():
        assert losses == [float(nn.functional.mse_loss(model(inputs), targets)) for inputs, targets in train]


def test_a_validation_due_inside_a_window_waits_for_its_end(tmp_path: Path) -> None:
    at_iterations: list[int] = []
    look = at("before_val", lambda engine: at_iterations.append(engine.progress.iteration), nth=0)
    make_engine(
        tmp_path, {"look": look}, train=batches(18), val=batches(1), accumulate=3, val_by_epoch=False, val_interval=4
    ).train()
    assert at_iterations == [6, 9, 12, 18], "4 is due at 6, 8 at 9, 12 at 12, 16 and the end at 18"


# Terms that the task counts before the forward pass. -----------------------------------------------------------------


class Crops(Hook):
    """Leaves the first two samples of each batch, before the forward pass."""

    def before_train_iter(self, engine: Engine, batch_idx: int, batch: Any) -> None:
        batch[:] = [part[:2] for part in batch]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_terms_are_counted_after_a_hook_has_changed_the_batch(tmp_path: Path, accumulate: int) -> None:
    train = [list(batch) for batch in batches(3)]
    engine = make_engine(
        tmp_path, {"crops": Crops()}, train=train, task=Counted(tiny_task().model), accumulate=accumulate, lr=0.05
    )
    engine.train()
    cropped = [(inputs[:2], targets[:2]) for inputs, targets in batches(3)]
    expected = make_engine(tmp_path, train=cropped, task=Total(tiny_task().model), accumulate=accumulate, lr=0.05)
    expected.train()
    for one, other in zip(engine.model.parameters(), expected.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-7)


def test_the_batches_of_a_window_are_counted_before_its_first_forward(tmp_path: Path) -> None:
    trace: list[str] = []

    class Tells(Counted):
        def forward(self, batch: Batch) -> dict[str, Any]:
            trace.append(f"forward {len(batch[0])}")
            return super().forward(batch)

        def count(self, batch: Batch) -> int:
            trace.append(f"count {len(batch[0])}")
            return len(batch[0])

    train = [batches(1, size)[0] for size in (4, 3, 2, 1)]
    make_engine(tmp_path, train=train, task=Tells(tiny_task().model), accumulate=3).train()
    assert trace == [
        "count 4", "count 3", "count 2", "forward 4", "forward 3", "forward 2", "count 1", "forward 1",
    ]  # fmt: skip


class Wrong(Counted):
    """Counts one term too many."""

    def forward(self, batch: Batch) -> dict[str, Any]:
        return super().forward(batch)

    def count(self, batch: Batch) -> int:
        return len(batch[0]) + 1


class Mean(Counted):
    """Returns the mean over the terms that it counts."""

    def forward(self, batch: Batch) -> dict[str, Any]:
        return Task.forward(self, batch)

    def count(self, batch: Batch) -> int:
        return len(batch[0])


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (Wrong, "count returned 10 for the first batches, and forward returned losses of 8 terms"),
        (Mean, "the task has a method count, and its loss is a mean over an unknown number of terms"),
    ],
)
def test_a_count_that_is_not_that_of_the_loss_is_refused(tmp_path: Path, kind: type[Task], problem: str) -> None:
    engine = make_engine(tmp_path, train=batches(4), task=kind(tiny_task().model, nn.MSELoss()), accumulate=2)
    with pytest.raises(UserError, match=problem) as caught:
        engine.train()
    assert caught.value.key == "task"
    assert engine.progress.optimizer_step == 0
