"""What each loss and each sample counts in a window. test_windows.py compares windows with a loop by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from hydraloop.data import build_loader
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import Loaders
from hydraloop.errors import UserError
from hydraloop.hooks import DistSamplerSeedHook, RuntimeInfoHook
from hydraloop.tasks import Task
from tests.helpers import Batch, at, batches, make_engine, tiny_task
from tests.ranks import on_ranks

UNEQUAL = [4, 4, 1, 3, 4, 2, 4, 2]
"""Samples of each batch: an unequal batch within a window, a short last window, a short last batch."""


def _unequal() -> list[Batch]:
    return [batch for seed, size in enumerate(UNEQUAL) for batch in batches(1, size, seed=seed)]


def _joined(window: list[Batch]) -> Batch:
    return torch.cat([inputs for inputs, _ in window]), torch.cat([targets for _, targets in window])


class Total(Task):
    """A task that leaves the mean to the engine."""

    def forward(self, batch: Batch) -> dict[str, Any]:
        inputs, targets = batch
        return {"loss": (nn.functional.mse_loss(self.model(inputs), targets, reduction="sum"), len(inputs))}


def test_hooks_know_whether_the_optimizer_stepped(tmp_path: Path) -> None:
    seen: list[tuple[bool, bool]] = []
    open_gradients: list[bool] = []
    waits_less_at: list[int] = []
    hooks = {
        "look": at(
            "after_train_iter",
            lambda engine: seen.append((engine.stepper.stepped, engine.stepper.window_closed)),
            nth=0,
        ),
        "inside": at("after_backward", lambda engine: open_gradients.append(not engine.stepper.window_closed), nth=0),
    }
    ranks = Distributed()
    ranks.lower_timeout = lambda: waits_less_at.append(engine.progress.iteration)  # type: ignore[method-assign]
    engine = make_engine(tmp_path, hooks, train=batches(5), accumulate=2, distributed=ranks)
    engine.train()
    assert seen == [(False, False), (True, True), (False, False), (True, True), (True, True)]
    assert open_gradients == [True] * 5
    assert waits_less_at == [1], "once, after the first step: until then, ranks that compile do not wait for each other"


def test_the_loss_that_hooks_see_is_the_batches_own(tmp_path: Path) -> None:
    train, losses = _unequal(), []

    class Losses(Hook):
        def after_train_iter(self, engine: Engine, batch_idx: int, batch: Batch, outputs: dict[str, Tensor]) -> None:
            losses.append(float(outputs["loss"]))

    make_engine(tmp_path, {"losses": Losses()}, train=train, accumulate=99).train()
    model = tiny_task().model
    with torch.no_grad():
        assert losses == [float(nn.functional.mse_loss(model(inputs), targets)) for inputs, targets in train]


# Samples that are not those of the sampler. --------------------------------------------------------------------------


class Crops(Hook):
    """Leaves the first two samples of each batch, before the forward pass."""

    def before_train_iter(self, engine: Engine, batch_idx: int, batch: Any) -> None:
        batch[:] = [part[:2] for part in batch]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_batch_is_counted_after_a_hook_has_changed_it(tmp_path: Path, accumulate: int) -> None:
    train = [list(batch) for batch in batches(3)]
    engine = make_engine(
        tmp_path, {"crops": Crops()}, train=train, task=Total(tiny_task().model), accumulate=accumulate, lr=0.05
    )
    engine.train()
    cropped = [(inputs[:2], targets[:2]) for inputs, targets in batches(3)]
    expected = make_engine(tmp_path, train=cropped, task=Total(tiny_task().model), accumulate=accumulate, lr=0.05)
    expected.train()
    for one, other in zip(engine.model.parameters(), expected.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-7)


class Samples(Dataset[Batch]):
    """Eighteen samples, one after the other."""

    def __init__(self) -> None:
        (self.inputs, self.targets), *_ = batches(1, 18)

    def __len__(self) -> int:
        return 18

    def __getitem__(self, index: int) -> Batch:
        return self.inputs[index], self.targets[index]


def drop(samples: list[Batch]) -> Any:
    """Leave out the samples whose first input is negative, as if they could not be read."""
    return default_collate([sample for sample in samples if sample[0][0] > 0] or samples[:1])


def merge(samples: list[Batch]) -> Any:
    """Make one sample of two, as a packed sequence does; the last one may be alone."""
    return default_collate([(x + samples[-1][0], y) for x, y in samples[::2]])


def repeat(samples: list[Batch]) -> Any:
    """Repeat samples, as crops of one picture do."""
    return default_collate([sample for number, sample in enumerate(samples) for _ in range(1 + number % 3)])


COLLATE: dict[str, Any] = {"drop": drop, "merge": merge, "repeat": repeat}


def loader_of(rank: int, ranks: int, collate: str, size: int) -> Any:
    options: dict[str, Any] = {"rank": rank, "world_size": ranks, "collate_fn": COLLATE[collate]}
    return build_loader(Samples(), shuffle=False, batch_size=size, **options)


def changed_on_rank(distributed: Distributed, run_dir: str, collate: str, accumulate: int, size: int) -> Any:
    """Train one epoch. Return the weights and the loss of the records."""
    train = loader_of(distributed.rank, distributed.world_size, collate, size)
    hooks: dict[str, Hook] = {"runtime_info": RuntimeInfoHook(), "sampler_seed": DistSamplerSeedHook()}
    options: dict[str, Any] = {"train": train, "accumulate": accumulate, "lr": 0.1, "distributed": distributed}
    engine = make_engine(Path(run_dir), hooks, **options)
    engine.train()
    weights = {name: value.detach().clone() for name, value in engine.model.state_dict().items()}
    return weights, engine.messages.means(distributed)["loss"]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("collate", ["drop", "merge", "repeat"])
def test_each_sample_that_is_there_counts_once(collate: str, accumulate: int, ranks: int, tmp_path: Path) -> None:
    """The same as by hand: of all samples in the batches of a window, on all ranks, one mean."""
    found = on_ranks(ranks, changed_on_rank, str(tmp_path), collate, accumulate, 6 // ranks)
    of_ranks = [list(loader_of(rank, ranks, collate, 6 // ranks)) for rank in range(ranks)]
    steps = [_joined([*batches]) for batches in zip(*of_ranks, strict=True)]
    windows = [steps[first : first + accumulate] for first in range(0, len(steps), accumulate)]
    total, samples, model = 0.0, 0, tiny_task().model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in windows:
        inputs, targets = _joined(window)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        total, samples = total + float(loss.detach()) * len(inputs), samples + len(inputs)
    for weights, record in found:
        assert record == pytest.approx(total / samples, rel=1e-6)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6)


def test_a_batch_without_samples_is_one_message(tmp_path: Path) -> None:
    """On several ranks, the launcher ends the others, as after each error of a rank."""
    engine = make_engine(tmp_path, train=[batches(1)[0], batches(1, 0)[0]])
    with pytest.raises(UserError, match=r"batch 1 \(from 0\) of this epoch has no samples") as caught:
        engine.train()
    assert caught.value.key == "data.loader.collate_fn"


class Odd(Task):
    """Returns a loss that cannot be trained on."""

    kind = ""

    def forward(self, batch: Batch) -> dict[str, Any]:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.model(inputs), targets)
        return {"loss": self.odd(loss)}

    def odd(self, loss: Tensor) -> Any:
        """Return what is wrong with it."""
        return {
            "detached": loss.detach(),
            "integer": loss.detach().long(),
            "a float": 0.5,
            "a vector": loss.repeat(3),
            "complex": loss * (1 + 0j),
            "no count": (loss, torch.zeros(3)),
            "three": (loss, 1, 2),
        }[self.kind]


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("detached", "the loss of Odd does not depend on the parameters of the optimizer"),
        ("integer", "the loss of Odd is torch.int64, which has no gradient"),
        ("a float", "the loss of Odd is a float, not a tensor"),
        ("a vector", r"the loss of Odd is a tensor of shape \[3\], not one number"),
        ("complex", "the loss of Odd is complex"),
        (
            "no count",
            r"the loss of Odd is a pair whose second entry is a tensor of shape \[3\], not a number",
        ),
        ("three", r"the loss of Odd is a tuple, not a tensor or a pair \(sum, count\)"),
    ],
)
def test_a_loss_that_cannot_be_trained_on_is_one_message(kind: str, problem: str, tmp_path: Path) -> None:
    task = Odd(tiny_task().model)
    task.kind = kind
    with pytest.raises(UserError, match=problem) as caught:
        make_engine(tmp_path, task=task).train()
    assert caught.value.key == "task"


class OddInEvaluation(Odd):
    """Returns such a loss in evaluation only."""

    def odd(self, loss: Tensor) -> Any:
        return loss if self.training else super().odd(loss)


class Counts(Task):
    """Counts a batch of its evaluation itself, with a loss that is a number."""

    def evaluate(self, batch: Batch) -> dict[str, Any]:
        found = self(batch)
        loss: Any = float(found["loss"])
        self.update_metrics(loss, found["outputs"], found["targets"], len(batch[0]))
        return {**found}


@pytest.mark.parametrize(
    ("task", "kind", "problem"),
    [
        (OddInEvaluation, "complex", "the loss of OddInEvaluation is complex"),
        (Counts, "", "the loss of Counts is a float, not a tensor"),
    ],
)
def test_a_loss_that_cannot_be_averaged_in_evaluation_is_one_message(
    task: type[Task], kind: str, problem: str, tmp_path: Path
) -> None:
    made: Any = task(tiny_task().model, nn.MSELoss())
    made.kind = kind
    with pytest.raises(UserError, match=problem) as caught:
        make_engine(tmp_path, task=made, val=batches(2)).train()
    assert caught.value.key == "task"


@pytest.mark.parametrize("empty", [None, [], {}])
@pytest.mark.parametrize("split", ["train", "val"])
def test_a_batch_that_is_nothing_is_one_message(split: str, empty: Any, tmp_path: Path) -> None:
    loader: Any = build_loader(Samples(), shuffle=False, batch_size=6, collate_fn=lambda samples: empty)
    with pytest.raises(UserError, match="a batch is empty") as caught:
        make_engine(tmp_path, **{split: loader}).train()
    assert caught.value.key == "data.loader.collate_fn"


class Mixed(Task):
    """Returns a mean in some batches, and a sum and a number in others."""

    def __init__(self, is_pair: Callable[[int], bool]) -> None:
        super().__init__(tiny_task().model)
        self.is_pair, self.batches = is_pair, 0

    def forward(self, batch: Batch) -> dict[str, Any]:
        inputs, targets = batch
        self.batches += 1
        loss = nn.functional.mse_loss(self.model(inputs), targets)
        return {"loss": (loss * len(inputs), len(inputs)) if self.is_pair(self.batches) else loss}


def test_batches_whose_losses_have_two_forms_are_one_message(tmp_path: Path) -> None:
    task = Mixed(lambda batch: batch == 2)
    with pytest.raises(UserError, match=r"a mean in some batches and a pair \(sum, count\) in others"):
        make_engine(tmp_path, train=batches(3), task=task, accumulate=3).train()


def test_another_loader_has_its_own_sizes(tmp_path: Path) -> None:
    """After `batches.use`, the weights of the batches are those of the new loader."""

    def trained(first: int, second: int) -> list[Tensor]:
        loaders: list[Any] = [build_loader(Samples(), shuffle=False, batch_size=size) for size in (first, second)]
        engine = make_engine(tmp_path / f"{first}-{second}", train=loaders[0], accumulate=3, max_epochs=1, lr=0.1)
        engine.batches.use(Loaders(loaders[1]))
        engine.train()
        return [parameter.detach() for parameter in engine.model.parameters()]

    for one, other in zip(trained(7, 8), trained(8, 8), strict=True):
        assert torch.equal(one, other)


class Twos(Task):
    """Two entries of dimension 0 are one sample."""

    def num_samples(self, batch: Batch) -> int:
        return (len(batch[0]) + 1) // 2


def test_a_task_that_counts_its_own_samples_is_asked_for_them(tmp_path: Path) -> None:
    """Also with a loader of which the sizes are known."""
    train: Any = build_loader(Samples(), shuffle=False, batch_size=7)
    task, model = Twos(tiny_task().model, nn.MSELoss()), tiny_task().model
    engine = make_engine(tmp_path, train=train, task=task, accumulate=3, lr=0.1)
    engine.train()
    assert engine.progress.samples == 4 + 4 + 2
    loss = sum(nn.functional.mse_loss(model(x), y) * ((len(x) + 1) // 2) for x, y in train) / 10
    assert isinstance(loss, Tensor)
    loss.backward()
    for found, start in zip(engine.model.parameters(), model.parameters(), strict=True):
        assert start.grad is not None
        torch.testing.assert_close(found, start.detach() - 0.1 * start.grad, rtol=0, atol=1e-6)
