"""LBFGS and SAM: steps that evaluate the loss several times, on one and two ranks as in a loop by hand."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import hydraloop
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.named_optimizers import OptimizerSet
from hydraloop.engine.precision import FP16, Autocast, Precision
from hydraloop.errors import UserError
from hydraloop.hooks import CheckpointHook, GradClipHook, RuntimeInfoHook
from hydraloop.tasks.task import Task
from tests.config.composed import REPOSITORY
from tests.helpers import Batch, at, batches, differences, make_engine, tiny_task
from tests.ranks import on_ranks


class SAM(optim.SGD):
    """Foret and others, 2021; as in davda54/sam, whose closure has a default."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        moves = [0.1 * parameter.grad / norm for parameter in parameters]
        with torch.no_grad():
            torch._foreach_add_(parameters, moves)
            closure()
            torch._foreach_sub_(parameters, moves)
        super().step()


MADE: dict[str, Any] = {
    "lbfgs": lambda parameters: optim.LBFGS(parameters, lr=0.5, max_iter=3, line_search_fn="strong_wolfe"),
    "sam": lambda parameters: SAM(parameters, lr=0.1, momentum=0.9),
}
DATA = batches(3, size=6, last=4)
"""The last batch is uneven: with two ranks, one of them has one sample, the other three."""
CLIP = 0.5


def by_hand(make: Any, model: nn.Module, clip: float | None = None, *, needs_gradients: bool = True) -> dict[str, Any]:
    """The state of the model after an epoch of the full batches, with every gradient clipped."""
    optimizer = make(model.parameters())
    for inputs, targets in DATA:

        def closure(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
            optimizer.zero_grad()
            with torch.enable_grad():
                loss = nn.functional.mse_loss(model(inputs), targets)
                torch.autograd.backward(loss)
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            return loss

        if needs_gradients:
            closure()
        optimizer.step(closure)
    return dict(model.state_dict())


class Logs(Task):
    """Logs its loss in each evaluation."""

    def forward(self, batch: Batch) -> dict[str, Any]:
        result = super().forward(batch)
        self.log("seen", result["loss"])
        return result


class Part(list[Batch]):
    """A rank's part of the batches, with the samples of all ranks as in hydraloop's loader if `counted`."""

    def __init__(self, distributed: Distributed, *, counted: bool) -> None:
        places = [slice(None)] if distributed.world_size == 1 else [slice(0, 3), slice(3, None)]
        super().__init__([(x[places[distributed.rank]], y[places[distributed.rank]]) for x, y in DATA])
        if counted:
            self.samples_at = lambda index: (len(self[index][0]), len(DATA[index][0]))


def engine_of(
    name: str,
    distributed: Distributed,
    run_dir: Path,
    *,
    counted: bool = True,
    hook: Hook | None = None,
    precision: Precision | None = None,
    several: bool = False,
    **settings: Any,
) -> Engine:
    """An engine whose records, checkpoints and clipping are those of a run."""
    task = Logs(tiny_task().model, nn.MSELoss())
    run_dir.mkdir(exist_ok=True)
    hooks = {"grad_clip": GradClipHook(max_norm=CLIP), "checkpoint": CheckpointHook()}
    weight, bias = task.parameters()
    both = {"first": optim.SGD([weight], lr=0.1), "second": optim.LBFGS([bias])}
    return make_engine(
        run_dir,
        hooks if hook is None else {**hooks, "mine": hook},
        train=Part(distributed, counted=counted),
        task=task,
        optimizer=OptimizerSet(both) if several else MADE[name](task.parameters()),
        distributed=distributed,
        precision=precision,
        **{"closures": {"": name == "sam" or None}, **settings},
    )


def trained(distributed: Distributed, name: str, run_dir: Path, counted: bool) -> dict[str, Tensor]:
    engine = engine_of(name, distributed, run_dir / str(distributed.rank), counted=counted)
    engine.train()
    assert engine.progress.optimizer_step == 3
    return dict(engine.model.state_dict())


@pytest.mark.parametrize("name", MADE)
def test_a_step_is_that_of_a_loop_by_hand(name: str, tmp_path: Path) -> None:
    """Each gradient is clipped, also those inside a step."""
    torch.testing.assert_close(
        trained(Distributed(), name, tmp_path, True), by_hand(MADE[name], tiny_task().model, CLIP), rtol=0, atol=0
    )


@pytest.mark.parametrize("counted", [True, False], ids=["samples known", "samples summed"])
@pytest.mark.parametrize("name", MADE)
def test_two_ranks_take_the_step_of_the_full_batch(name: str, counted: bool, tmp_path: Path) -> None:
    """LBFGS calls the closure as often as the loss requires, so all ranks need the same loss."""
    first, second = on_ranks(2, trained, name, tmp_path, counted)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first, by_hand(MADE[name], tiny_task().model, CLIP), rtol=1e-5, atol=1e-6)


def test_the_option_gives_a_closure_to_an_optimizer_that_does_not_require_one(tmp_path: Path) -> None:
    calls = []
    cfg = hydraloop.compose(
        ["optimizer.closure=true", "engine.device=cpu", "engine.max_iters=2", "engine.test=false"], folder=REPOSITORY
    )
    engine = hydraloop.build(cfg, run_dir=tmp_path)
    engine.task.model.register_forward_hook(lambda *_: calls.append(engine.task.training))
    engine.train()
    assert sum(calls) == 4, "in each step, a pass of the engine and one of the closure"


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("nth", [1, 2], ids=["before the step", "inside the step"])
def test_a_step_with_a_closure_cannot_be_skipped(name: str, nth: int, tmp_path: Path) -> None:
    skipping = at("before_optimizer_step", lambda engine: engine.skip_step(), nth=nth)
    engine = engine_of(name, Distributed(), tmp_path, hook=skipping)
    with pytest.raises(RuntimeError, match="computes the loss several times in a step"):
        engine.train()


class WarmSAM(SAM):
    """A SAM whose distance is 0 in the first step."""

    distance = 0.0

    @torch.no_grad()
    def step(self, closure: Any) -> None:  # type: ignore[override]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        moves = [self.distance * parameter.grad for parameter in parameters]
        self.distance = 0.5
        torch._foreach_add_(parameters, moves)
        closure()
        torch._foreach_sub_(parameters, moves)
        optim.SGD.step(self)


def check_by_hand(make: Any, task: Task, run_dir: Path, *, needs_gradients: bool) -> None:
    """Train the task, and a copy of its model in a loop by hand; both must end with the same state."""
    expected = by_hand(make, copy.deepcopy(task.model), needs_gradients=needs_gradients)
    engine = make_engine(run_dir, train=DATA, task=task, optimizer=make(task.parameters()), closures={"": True})
    engine.train()
    torch.testing.assert_close(dict(task.model.state_dict()), expected, rtol=0, atol=0)


def test_a_sam_may_begin_with_a_distance_of_zero(tmp_path: Path) -> None:
    task = Task(nn.Linear(3, 1), nn.MSELoss())
    check_by_hand(lambda parameters: WarmSAM(parameters, lr=0.1), task, tmp_path, needs_gradients=True)


class DataSAM(optim.SGD):
    """A SAM that needs the gradients, and moves the weights without a trace for autograd."""

    def step(self, closure: Any) -> None:  # type: ignore[override]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        moves = [0.1 * parameter.grad for parameter in parameters]
        torch._foreach_add_([parameter.data for parameter in parameters], moves)
        closure()
        torch._foreach_sub_([parameter.data for parameter in parameters], moves)
        super().step()


@pytest.mark.parametrize(
    ("make", "calls", "needs_gradients"),
    [
        (lambda parameters: optim.LBFGS(parameters, max_iter=1), 1, False),
        (lambda parameters: SAM(parameters, lr=0.1), 2, True),
        (lambda parameters: DataSAM(parameters, lr=0.1), 2, True),
    ],
    ids=["lbfgs", "sam", "data"],
)
def test_a_step_evaluates_as_often_as_a_loop_by_hand(
    make: Any, calls: int, needs_gradients: bool, tmp_path: Path
) -> None:
    """So the statistics of BatchNorm move as often, too."""
    task = Task(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)), nn.MSELoss())
    check_by_hand(make, task, tmp_path, needs_gradients=needs_gradients)
    assert int(task.model[1].num_batches_tracked) == calls * len(DATA)


@pytest.mark.parametrize("name", MADE)
def test_a_resumed_run_equals_the_uninterrupted_one(name: str, tmp_path: Path) -> None:
    whole = engine_of(name, Distributed(), tmp_path / "whole", max_epochs=2)
    whole.train()
    first = tmp_path / "whole" / "checkpoints" / "epoch_1.pth"
    resumed = engine_of(name, Distributed(), tmp_path / "resumed", max_epochs=2, resume=first)
    resumed.train()
    assert not list(differences(resumed.model.state_dict(), whole.model.state_dict()))
    assert not list(differences(resumed.optimizer.state_dict(), whole.optimizer.state_dict()))


@pytest.mark.parametrize("name", MADE)
def test_the_values_of_an_iteration_are_those_before_the_step(name: str, tmp_path: Path) -> None:
    values = []

    def read(self: RuntimeInfoHook, engine: Engine, batch_idx: int, batch: Any, outputs: Any) -> None:
        RuntimeInfoHook.after_train_iter(self, engine, batch_idx, batch, outputs)
        losses = engine.messages.read("losses")  # those of the records
        values.append((losses["seen"], losses["loss"]))

    hook = type("Reads", (RuntimeInfoHook,), {"after_train_iter": read})()
    engine_of(name, Distributed(), tmp_path, hook=hook, precision=Autocast(torch.device("cpu"))).train()
    assert len(values) == 3
    assert all(torch.equal(logged, loss) for logged, loss in values)


@pytest.mark.parametrize(
    ("key", "settings", "parts"),
    [
        ("engine.accumulate", {"accumulate": 2}, {}),
        ("precision", {}, {"precision": FP16(torch.device("cpu"))}),
        ("optimizer.second", {}, {"several": True}),
    ],
)
def test_what_is_not_possible_is_refused(key: str, settings: Any, parts: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="LBFGS evaluates the loss several times in a step") as caught:
        engine_of("lbfgs", Distributed(), tmp_path, **settings, **parts)
    assert caught.value.key == key
