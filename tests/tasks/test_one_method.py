"""A task of one method: forward returns the loss, outputs and targets, and other scalars."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hydraloop.data import InMemoryDataset, build_loader
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.run_parts import Settings
from hydraloop.errors import UserError
from hydraloop.files.metrics_log import FILENAME
from hydraloop.hooks import LoggerHook, RuntimeInfoHook
from hydraloop.tasks import MeanAbsoluteError, SumMetric, Task
from tests.helpers import EngineWithNeededHooks, make_engine
from tests.ranks import on_ranks


class OneMethod(Task):
    """Batches are dicts; the loss is computed here."""

    def forward(self, batch: Any) -> dict[str, Any]:
        outputs = self.model(batch["x"])
        error = (outputs - batch["y"]).square()
        return {"loss": error.mean(), "largest": batch["y"].max(), "outputs": outputs, "targets": batch["y"]}


class Pairs(Task):
    """The loss is a sum and a number of terms; only batches with a large input have the scalar `large`."""

    def forward(self, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        result: dict[str, Any] = {"loss": (self.model(inputs).sum(), inputs.numel())}
        if inputs.max() >= 4:
            result["large"] = inputs.max()
        return {**result, "outputs": inputs, "targets": targets}


class Constant(nn.Module):
    """Returns one parameter for each input."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * 0 + self.value


def batch_of(*targets: float) -> dict[str, Tensor]:
    return {"x": torch.zeros(len(targets), 1), "y": torch.tensor(targets).unsqueeze(1)}


def test_one_method_trains_validates_and_tests_with_the_same_names(tmp_path: Path) -> None:
    task = OneMethod(Constant(), metrics={"mae": MeanAbsoluteError()})
    engine = make_engine(
        tmp_path,
        {"runtime_info": RuntimeInfoHook(), "logger": LoggerHook(interval=2)},
        train=[batch_of(1, 3), batch_of(5)],
        val=[batch_of(1, 3), batch_of(6)],
        test=[batch_of(2, 2), batch_of(-4)],
        task=task,
        lr=0.0,
    )
    engine.train()
    train, val, test = (json.loads(line) for line in (tmp_path / FILENAME).read_text().splitlines())
    assert (train["loss"], train["largest"]) == (pytest.approx((5 * 2 + 25) / 3), pytest.approx((3 * 2 + 5) / 3))
    assert {name: val[name] for name in ("mae", "loss", "largest")} == pytest.approx(
        {"mae": 10 / 3, "loss": (1 + 9 + 36) / 3, "largest": (2 * 3 + 6) / 3}
    )
    assert {name: test[name] for name in ("mae", "loss", "largest")} == pytest.approx(
        {"mae": 8 / 3, "loss": (4 + 4 + 16) / 3, "largest": 0}
    )
    assert task.metric_names == ("mae", "loss", "largest")
    assert [task.higher_is_better(name) for name in task.metric_names] == [False, False, None]


def validate_pairs(distributed: Distributed, samples: int) -> list[dict[str, float]]:
    task = Pairs(nn.Identity(), metrics={"mae": MeanAbsoluteError()})
    part = {"rank": distributed.rank, "world_size": distributed.world_size}
    inputs = torch.arange(1.0, 1 + samples).unsqueeze(1)
    val = build_loader(InMemoryDataset(inputs, inputs + 1), shuffle=False, batch_size=1, **part)
    engine = EngineWithNeededHooks(
        task=task, loaders=Loaders(None, val), settings=Settings(device="cpu"), distributed=distributed
    )
    return [engine.validate(), engine.validate()]


def test_ranks_without_a_scalar_agree_on_the_names() -> None:
    expected = {"mae": 1.0, "loss": 3.0, "large": 4.5}
    assert validate_pairs(Distributed(), 5) == [expected] * 2
    assert on_ranks(2, validate_pairs, 5) == [[expected] * 2] * 2


def test_a_scalar_that_is_missing_in_a_later_evaluation_is_left_out() -> None:
    task = Pairs(nn.Identity())
    for value, expected in ((5.0, {"loss": 5.0, "large": 5.0}), (1.0, {"loss": 1.0})):
        task.reset_metrics()
        task.evaluate((torch.tensor([[value]]), torch.zeros(1, 1)))
        assert task.compute_metrics() == expected


class Boxes(SumMetric):
    """The mean number of boxes of an image, of lists with a dict for each image."""

    def __init__(self) -> None:
        super().__init__(2)

    def update(self, preds: Any, target: Any) -> None:
        self.sums += torch.tensor([sum(len(boxes["boxes"]) for boxes in target), len(preds)])

    def value(self, sums: Tensor) -> Tensor:
        return sums[0] / sums[1]


class Detection(Task):
    """Is called as detectors of torchvision are: they return losses in training only."""

    def forward(self, batch: Any) -> dict[str, Any]:
        images, targets = batch
        self.log("brightest", torch.stack([*images]).amax((1, 2, 3)).mean())
        return {"outputs": [{} for _ in images], "targets": targets}


def validate_detection(distributed: Distributed) -> dict[str, float]:
    images = [torch.full((3, 4, 4), float(n)) for n in range(5)]
    data: Any = [(image, {"boxes": torch.zeros(n, 4)}) for n, image in enumerate(images)]
    part = {"rank": distributed.rank, "world_size": distributed.world_size}
    val = build_loader(
        data, shuffle=False, batch_size=2, collate_fn=lambda samples: tuple(zip(*samples, strict=True)), **part
    )
    task = Detection(nn.Identity(), metrics={"boxes": Boxes()})
    engine = EngineWithNeededHooks(
        task=task, loaders=Loaders(None, val), settings=Settings(device="cpu"), distributed=distributed
    )
    return engine.validate()


def test_a_model_without_a_loss_in_evaluation_has_only_its_metrics() -> None:
    """Also with lists of images and of boxes: each image counts once."""
    expected = {"boxes": 2.0, "brightest": 2.0}
    assert validate_detection(Distributed()) == expected
    assert on_ranks(2, validate_detection) == [expected] * 2


def test_a_metric_has_precedence_over_a_scalar_of_its_name() -> None:
    task = OneMethod(Constant(), metrics={"largest": MeanAbsoluteError()})
    task.reset_metrics()
    task.evaluate(batch_of(1, 3))
    assert task.compute_metrics() == {"largest": 2.0, "loss": 5.0}


class NoOutputs(Task):
    """Returns a loss only, or what `answer` is."""

    answer: Any = None

    def forward(self, batch: Any) -> Any:
        return {"loss": batch.mean()} if self.answer is None else self.answer


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (None, r"returned no outputs and no targets in eval mode, which the metrics \(mae\) need"),
        ({"loss": torch.zeros(3)}, r"the loss of NoOutputs is a tensor of shape \[3\], not one number"),
        ({"loss": torch.zeros(()), "iteration": 3}, "every record already has an entry 'iteration'"),
        (torch.zeros(()), "NoOutputs.forward returned a Tensor, without a 'loss'"),
        ({"los": 1}, r"NoOutputs.forward returned a dict with \['los'\], without a 'loss'"),
    ],
)
def test_a_wrong_result_gives_one_message(answer: Any, problem: str) -> None:
    task = NoOutputs(nn.Identity(), metrics={"mae": MeanAbsoluteError()})
    task.answer = answer
    task.reset_metrics()
    with pytest.raises(UserError, match=problem):
        task.evaluate(torch.zeros(3))


def test_a_task_without_a_loss_says_so_when_it_needs_one() -> None:
    with pytest.raises(UserError, match="which is null") as caught:
        Task(nn.Identity())((torch.zeros(2), torch.zeros(2)))
    assert caught.value.key == "task.loss"


class Half(nn.Module):
    """Has some of what the engine uses."""

    model = nn.Identity()
    metric_names = ("loss",)

    def evaluate(self, batch: Any) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        (nn.Linear(1, 1), "Linear is not a task: it has no model"),
        (Half(), "Half is not a task: it has no num_samples"),
    ],
)
def test_what_is_not_a_task_gives_one_message(task: nn.Module, problem: str) -> None:
    with pytest.raises(UserError, match=problem) as caught:
        EngineWithNeededHooks(task=task, loaders=Loaders(None, [batch_of(1)]), settings=Settings(device="cpu"))
    assert caught.value.key == "task"
