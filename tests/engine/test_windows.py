"""Training in windows of 3 batches: the order of events, where an epoch and a run end, and errors inside a window."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.errors import UserError
from hydraloop.tasks import Task
from tests.helpers import Batch, Recorder, at, batches, differences, make_engine, tiny_task

SIZES = [4, 2, 1, 3, 4, 2, 4]
"""Samples of each batch of an epoch: its windows have 3, 3 and 1 batches."""
START = ["before_run", "at_position", "before_train", "before_train_epoch"]
VAL = [
    "before_val", "before_val_epoch", "before_val_iter 0", "forward", "after_val_iter 0", "after_val_epoch",
    "after_val",
]  # fmt: skip
END = ["after_train", "after_run"]


class Trace(list[str]):
    """What happens in a run, in order. May raise at the nth event of a kind."""

    def __init__(self, kind: str = "", nth: int = 0) -> None:
        super().__init__()
        self.kind, self.nth = kind, nth

    def append(self, event: str) -> None:
        super().append(event)
        if event.split()[0] == self.kind and self.count_of(self.kind) == self.nth:
            raise RuntimeError("on purpose")

    def count_of(self, kind: str) -> int:
        return sum(event.split()[0] == kind for event in self)


class Source:
    """A loader of any number of batches, which notes when each is fetched. Each iteration makes new tensors.

    Args:
        found: the batches.
        trace: of the run.
        length: what `len` returns; None: the number of batches.
    """

    def __init__(self, found: Sequence[Batch], trace: Trace, length: int | None = None) -> None:
        self.found, self.trace, self.length = found, trace, len(found) if length is None else length
        self.made: list[weakref.ref[Any]] = []
        """All iterators and inputs that were made."""

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Batch]:
        iterator = self._batches()
        self.made.append(weakref.ref(iterator))
        return iterator

    def _batches(self) -> Iterator[Batch]:
        for index in range(len(self.found)):
            self.trace.append(f"fetch {index}")
            batch = tuple(tensor.clone() for tensor in self.found[index])
            self.made.append(weakref.ref(batch[0]))
            yield batch  # type: ignore[misc]  # two tensors
            del batch

    def alive(self) -> list[Any]:
        """Return the iterators and inputs that still exist."""
        return [one() for one in self.made if one() is not None]


class Watched(Task):
    """A task that notes its forward and backward passes."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(tiny_task().model, nn.MSELoss())
        self.trace = trace

    def forward(self, batch: Batch) -> dict[str, Any]:
        self.trace.append("forward")
        outputs = super().forward(batch)
        if outputs["loss"].requires_grad:
            outputs["loss"].register_hook(lambda gradient: self.trace.append("backward"))
        return outputs


def _epoch() -> list[Batch]:
    return [batches(1, size, seed=seed)[0] for seed, size in enumerate(SIZES)]


def _engine(
    run_dir: Path, hooks: Mapping[str, Any] | None = None, *, trace: Trace | None = None, **options: Any
) -> Engine:
    """Make an engine with windows of 3 batches. `trace` gets all events, in place of a plain epoch of batches."""
    run_dir.mkdir(exist_ok=True)
    trace = Trace() if trace is None else trace
    task = Watched(trace)
    optimizer = torch.optim.SGD(task.parameters(), lr=0.05, momentum=0.9)
    optimizer.register_step_pre_hook(lambda *_: trace.append("step"))
    options = {"train": Source(_epoch(), trace), "accumulate": 3, "sanity_val_steps": 0, **options}
    return make_engine(
        run_dir, {"recorder": Recorder(trace), **(hooks or {})}, task=task, optimizer=optimizer, **options
    )


def _window(*indices: int) -> list[str]:
    """The events of one window."""
    events = []
    for index in indices:
        events += [f"fetch {index}", f"before_train_iter {index}", "forward", "backward", f"after_backward {index}"]
        if index == indices[-1]:
            events += [f"before_optimizer_step {index}", "step"]
        events.append(f"after_train_iter {index}")
    return events


def _assert_trained_on(engine: Engine, windows: list[list[Batch]]) -> None:
    """Compare with a loop written by hand, in which each window is one batch with all its samples."""
    model = tiny_task().model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for window in windows:
        inputs, targets = (torch.cat(tensors) for tensors in zip(*window, strict=True))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    assert engine.progress.optimizer_step == len(windows)
    for one, other in zip(engine.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def _of(found: Sequence[Batch], *windows: Sequence[int]) -> list[list[Batch]]:
    return [[found[index] for index in window] for window in windows]


def _state(engine: Engine) -> dict[str, Any]:
    return {"model": engine.model.state_dict(), "optimizer": engine.optimizer.state_dict()}


def _result(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "result.json").read_text())
    return found


# The order. ----------------------------------------------------------------------------------------------------------


def test_validations_and_checkpoints_wait_for_the_end_of_a_window(tmp_path: Path) -> None:
    trace = Trace()
    hooks = {
        "first": at("before_train_iter", lambda engine: engine.request_checkpoint("a"), nth=2),
        "second": at("after_backward", lambda engine: engine.request_checkpoint("b"), nth=4),
        "third": at("before_optimizer_step", lambda engine: engine.request_checkpoint("c"), nth=2),
    }
    options = {"val": batches(1), "val_by_epoch": False, "val_interval": 2}
    _engine(tmp_path, hooks, trace=trace, **options).train()
    assert trace == [
        *START,
        *_window(0, 1, 2), "before_save_checkpoint", *VAL,
        *_window(3, 4, 5), "before_save_checkpoint", "before_save_checkpoint", *VAL,
        *_window(6), "after_train_epoch", *VAL,
        *END,
    ]  # fmt: skip
    saved = {tag: torch.load(tmp_path / "checkpoints" / f"{tag}.pth", weights_only=True) for tag in "abc"}
    assert [one["progress"]["iteration"] for one in saved.values()] == [3, 6, 6]


# Ends. ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_iters", "before", "after"),
    [
        (5, [(0, 1, 2), (3, 4)], [(5, 6), (0, 1, 2), (3, 4, 5), (6,)]),
        (9, [(0, 1, 2), (3, 4, 5), (6,), (0, 1)], [(2, 3, 4), (5, 6)]),
    ],
)
def test_max_iters_cuts_the_last_window_and_a_longer_run_continues(
    tmp_path: Path, max_iters: int, before: list[Sequence[int]], after: list[Sequence[int]]
) -> None:
    trace, found = Trace(), _epoch()
    _engine(tmp_path, trace=trace, max_iters=max_iters).train()
    of_batches = [event for window in before for event in _window(*window)]
    assert [event for event in trace if event in of_batches] == of_batches, "no batch is fetched after the last one"

    save = at("after_train", lambda engine: engine.request_checkpoint("end"))
    first = _engine(tmp_path, {"save": save}, train=found, max_iters=max_iters)
    first.train()
    _assert_trained_on(first, _of(found, *before))
    assert all(parameter.grad is None for parameter in first.model.parameters())
    longer = _engine(tmp_path, train=found, max_iters=14, resume=tmp_path / "checkpoints" / "end.pth")
    longer.train()
    assert longer.progress.iteration == 14
    _assert_trained_on(longer, _of(found, *before, *after))


@pytest.mark.parametrize(("yields", "limit"), [(3, None), (5, 6)])
def test_a_loader_that_ends_too_early_leaves_no_step_of_the_open_window(
    tmp_path: Path, yields: int, limit: int | None
) -> None:
    trace, found = Trace(), _epoch()
    source = Source(found[:yields], trace, length=7)
    engine = _engine(tmp_path, trace=trace, train=source, limit_train_batches=limit)
    with pytest.raises(UserError, match=f"the loader has a length of 7 batches and yielded {yields}") as caught:
        engine.train()
    assert caught.value.key == "data.train"
    assert "__len__" in str(caught.value)
    assert engine.progress.iteration == yields
    _assert_trained_on(engine, _of(found, (0, 1, 2), (3, 4, 5))[: yields // 3])
    assert trace[-3:] == ["on_exception", *END]


def test_a_loader_that_does_not_end_is_refused_after_its_last_window(tmp_path: Path) -> None:
    trace, found = Trace(), _epoch()
    engine = _engine(tmp_path, trace=trace, train=Source(found, trace, length=5))
    with pytest.raises(UserError, match="the loader has a length of 5 batches and yielded more") as caught:
        engine.train()
    assert caught.value.key == "data.train"
    assert trace == [*START, *_window(0, 1, 2), *_window(3, 4), "fetch 5", "on_exception", *END]
    _assert_trained_on(engine, _of(found, (0, 1, 2), (3, 4)))


# Errors and stops inside a window. -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "index"),
    [
        *((kind, index) for kind in ("fetch", "before_train_iter", "forward", "backward", "after_backward")
          for index in (3, 5)),
        ("before_optimizer_step", 5),
        ("step", 5),
        *(("after_train_iter", index) for index in (3, 4, 5)),
    ],
)  # fmt: skip
def test_no_gradient_is_left_of_a_window_that_an_error_breaks(tmp_path: Path, kind: str, index: int) -> None:
    """The same engine trains again, after the last completed batch."""
    once_in_a_window = kind in ("before_optimizer_step", "step")
    trace, found = Trace(kind, nth=2 if once_in_a_window else index + 1), _epoch()
    engine = _engine(tmp_path, trace=trace)
    with pytest.raises(RuntimeError, match="on purpose"):
        engine.train()
    assert trace[-3:] == ["on_exception", *END]
    assert [trace.count(point) for point in trace[-3:]] == [1, 1, 1]
    assert _result(tmp_path)["status"] == "failed"
    assert "on purpose" in _result(tmp_path)["error"]
    completed = index + (kind == "after_train_iter")
    assert engine.progress.batch_in_epoch == engine.progress.iteration == completed

    assert engine.train().status == "finished"
    assert _result(tmp_path)["error"] is None
    rest = range(3, 7) if completed == 6 else range(completed, 7)  # after the step, nothing is lost
    other = _engine(tmp_path / "other", train=[found[index] for index in (0, 1, 2, *rest)])
    other.train()
    assert list(differences(_state(engine), _state(other))) == []


ASKED = [
    ("before_train_iter", 4),
    ("after_backward", 5),
    ("after_train_iter", 5),
    ("before_optimizer_step", 2),
    ("after_train_iter", 6),
]
"""A mount point and its nth call, in the second window."""


@pytest.mark.parametrize(("point", "nth"), ASKED)
def test_a_stop_inside_a_window_ends_the_run_at_its_end(tmp_path: Path, point: str, nth: int) -> None:
    trace = Trace()
    stop = at(point, lambda engine: engine.request_stop("enough"), nth=nth)
    engine = _engine(tmp_path, {"stop": stop}, trace=trace)
    assert engine.train().status == "stopped"
    assert trace == [*START, *_window(0, 1, 2), *_window(3, 4, 5), *END]
    _assert_trained_on(engine, _of(_epoch(), (0, 1, 2), (3, 4, 5)))


# What is kept. -------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """References alone decide what is kept."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize("stop_at", [None, 4])
def test_no_batch_and_no_iterator_outlives_an_epoch_or_a_stop_inside_it(tmp_path: Path, stop_at: int | None) -> None:
    source, kept = Source(_epoch(), Trace()), []
    hooks: dict[str, Hook] = {
        "look": at("after_train" if stop_at else "after_train_epoch", lambda engine: kept.append(source.alive()))
    }
    if stop_at:
        hooks["stop"] = at("after_train_iter", lambda engine: engine.request_stop("enough"), nth=stop_at)
    _engine(tmp_path, {**hooks, "recorder": None}, train=source).train()  # the recorder keeps batches
    assert kept == [[]]
    assert len(source.made) == (7 if stop_at else 8)
