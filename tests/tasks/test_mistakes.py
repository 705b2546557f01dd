"""Mistakes in models and data: the key, what is wrong, and a fix, in the sanity step and in training."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hydraloop.engine.engine import Engine
from hydraloop.errors import UserError
from hydraloop.tasks import Classification, LanguageModeling, MultiLabel, Regression, Segmentation, Task
from hydraloop.tasks.layer_inputs import needed_input
from tests.helpers import make_engine

INPUTS, CLASSES = torch.randn(4, 2), torch.tensor([0, 1, 2, 0])
GOOD = (INPUTS, CLASSES)
IMAGES, MASKS = torch.randn(2, 1, 3, 3), torch.zeros(2, 3, 3, dtype=torch.int64)


class Net(nn.Module):
    """Points `[N, 2]` to logits `[N, classes]`."""

    def __init__(self, classes: int = 3, points: int = 2) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(points, 8), nn.ReLU(), nn.Linear(8, classes))

    def forward(self, points: Tensor) -> Tensor:
        logits: Tensor = self.net(points)
        return logits


def classification(options: dict[str, Any] | None = None, **net: int) -> Classification:
    task = Classification(Net(**net), nn.CrossEntropyLoss())
    if options is not None:
        task.options = {"model": options}
    return task


def mistake(tmp_path: Path, task: Task, batch: Any, in_training: bool = False, others: Any = ()) -> UserError:
    """Return the mistake that a run says, in its first validation batch or in training."""
    splits = {"train": [batch, *others]} if in_training else {"train": [batch], "val": [batch, *others]}
    engine = make_engine(tmp_path, task=task, **splits)
    with pytest.raises(UserError) as caught:
        engine.train()
    assert caught.value.__cause__ is not None, "the original error is kept"
    assert engine.error is caught.value
    return caught.value


# Labels. -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_training", [True, False])
def test_labels_that_are_not_below_the_number_of_classes(tmp_path: Path, in_training: bool) -> None:
    task = classification({"width": 8, "classes": 2}, classes=2)
    found = mistake(tmp_path, task, GOOD, in_training, [(INPUTS, CLASSES + 3)])
    split = "train" if in_training else "val"
    assert found.key == "task.model.classes"
    assert found.problem == (f"the model has 2 classes, 0 to 1, but the labels in data.{split} are 0, 1, 2, 3, 4, 5")
    assert found.remedy == "Use task.model.classes=6."


@pytest.mark.parametrize(
    ("options", "labels", "key", "remedy"),
    [
        (None, [0, 1, 2, 3], "task.model", "Let the model have 4 classes."),
        ({"points": 2}, [0, 1, 2, 3], "task.model.classes", "Use +task.model.classes=4."),
        (
            {"head": {"classes": 3}},
            [1, 2, 3, 3],
            "task.model.head.classes",
            "Use task.model.head.classes=4. Classes beg",
        ),
        ({"classes": 3}, [0, 1, 2, -1], "task.model", "no label: +task.loss.ignore_index=-1."),
        ({"classes": 3}, [0, 1, 2, 255], "task.model", "no label: +task.loss.ignore_index=255."),
    ],
)
def test_the_fix_of_labels(tmp_path: Path, options: Any, labels: list[int], key: str, remedy: str) -> None:
    found = mistake(tmp_path, classification(options), (INPUTS, torch.tensor(labels)))
    assert found.key == key
    assert found.remedy is not None
    assert remedy in found.remedy


def test_labels_of_pixels_and_tokens(tmp_path: Path) -> None:
    segmentation = Segmentation(nn.Conv2d(1, 3, 1), 3)
    segmentation.options = {"model": {"out_channels": 3, "in_channels": 1}, "num_classes": 3}
    found = mistake(tmp_path, segmentation, (IMAGES, MASKS + 4))
    assert found.remedy is not None
    assert found.remedy.startswith("Use task.model.out_channels=5 task.num_classes=5. ")
    found = mistake(tmp_path, segmentation, (IMAGES, MASKS - 1))
    assert "task.ignore_index=-1" in str(found)
    text = LanguageModeling(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 5)))
    found = mistake(tmp_path, text, torch.tensor([[0, 7, 8]]))
    assert "the model has 5 classes, 0 to 4, but the labels in data.val are" in found.problem


@pytest.mark.parametrize("targets", [CLASSES.float(), CLASSES[:, None]])
def test_targets_of_another_type_or_shape(tmp_path: Path, targets: Tensor) -> None:
    found = mistake(tmp_path, classification(), (INPUTS, targets))
    assert found.key == "data.val"
    assert "but the loss takes classes, int64 [4]" in found.problem


def test_a_loss_that_does_not_fit_the_targets(tmp_path: Path) -> None:
    found = mistake(tmp_path, Classification(Net(), nn.MSELoss()), (INPUTS, CLASSES))
    assert found.key == "task.loss"
    assert re.match(r"MSELoss got outputs float32 \[4, \d\] and targets int64 \[4\]: ", found.problem)


class GpuError(RuntimeError):
    """What torch raises after an assertion on a GPU, at any later call."""


@pytest.mark.parametrize(("labels", "key"), [([0, 1, 2, 3], "task.model.num_classes"), ([0, 1, 2, 0], "engine.device")])
def test_an_assertion_of_a_gpu_says_what_can_be_said(tmp_path: Path, labels: list[int], key: str) -> None:
    class Asserts(Classification):
        num_classes = 3  # type: ignore[assignment]  # nn.Module declares no such attribute

        def forward(self, batch: Any) -> dict[str, Any]:
            raise GpuError("CUDA error: device-side assert triggered")

    task = Asserts(Net(), nn.CrossEntropyLoss())
    task.options = {"model": {"num_classes": 3}}
    assert mistake(tmp_path, task, (INPUTS, torch.tensor(labels)), in_training=True).key == key


# Batches. ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_training", [True, False])
@pytest.mark.parametrize(
    ("batch", "shown"),
    [
        ({"x": INPUTS, "y": CLASSES}, "dict with x: float32 [4, 2], y: int64 [4]"),
        ((INPUTS, CLASSES, CLASSES), "tuple with 0: float32 [4, 2], 1: int64 [4], 2: int64 [4]"),
        (INPUTS, "float32 [4, 2]"),
        ([INPUTS, ["a", "b"]], "list with 0: float32 [4, 2], 1: list"),
    ],
)
def test_a_batch_of_another_form(tmp_path: Path, batch: Any, shown: str, in_training: bool) -> None:
    found = mistake(tmp_path, classification(), batch, in_training)
    assert found.key == ("data.train" if in_training else "data.val")
    assert found.problem == f"a batch of it is {shown}, but Classification takes (inputs, targets)"


@pytest.mark.parametrize(
    "task",
    [Regression(Net(), nn.MSELoss()), Segmentation(Net(), 3), MultiLabel(Net(), 3), LanguageModeling(Net())],
)
def test_every_task_names_its_form(tmp_path: Path, task: Task) -> None:
    found = mistake(tmp_path, task, {"input_ids": CLASSES[None], "labels": CLASSES[None]})
    assert f"but {type(task).__name__} takes {task.batch_form}" in found.problem
    assert found.remedy is not None
    assert "task=huggingface" in found.remedy


def test_an_error_in_a_users_own_forward_stays_as_it_is(tmp_path: Path) -> None:
    class Own(Task):
        def forward(self, batch: Any) -> dict[str, Any]:
            inputs, targets = batch
            return {"loss": inputs @ targets}

    engine = make_engine(tmp_path, task=Own(Net()), train=[{"x": INPUTS}])
    with pytest.raises(ValueError, match="not enough values to unpack"):
        engine.train()


# Layers. -------------------------------------------------------------------------------------------------------------


def test_a_number_of_classes_is_not_the_size_of_an_input(tmp_path: Path) -> None:
    """`num_classes` may happen to be the size that the first layer takes."""
    task = classification({"num_classes": 3}, points=3)
    assert mistake(tmp_path, task, GOOD).remedy == "Change the layer, or what it gets."


def test_a_layer_is_named_with_what_it_got_and_what_it_takes(tmp_path: Path) -> None:
    task = classification({"points": 5, "classes": 3}, points=5)
    for in_training in (True, False):
        found = mistake(tmp_path, task, GOOD, in_training)
        assert found.problem == (
            "its layer net.0, Linear(in_features=5, out_features=8, bias=True), got float32 [4, 2], but takes [..., 5]"
        )
        assert (found.key, found.remedy) == ("task.model", "Use task.model.points=2, or change the data.")


def test_a_layer_inside_names_the_inputs_of_the_model(tmp_path: Path) -> None:
    task = Classification(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(9, 3)), nn.CrossEntropyLoss())
    found = mistake(tmp_path, task, (torch.randn(4, 1, 5, 6), CLASSES))
    assert "its layer 2, Linear(" in found.problem
    assert found.problem.endswith("got float32 [4, 48], but takes [..., 9]")
    assert found.remedy == "Change the layer, or what it gets. The model got float32 [4, 1, 5, 6]."


def test_the_inputs_of_the_model_are_not_the_batch_if_the_task_cuts_it(tmp_path: Path) -> None:
    tokens = torch.arange(15).reshape(3, 5)
    found = mistake(tmp_path, LanguageModeling(nn.Sequential(nn.Embedding(10, 12))), tokens)
    assert found.problem.endswith("got int64 [3, 4], but takes indices below 10; the largest is 13")
    assert found.remedy == "Change the layer, or what it gets."


@pytest.mark.parametrize(
    ("layer", "got", "takes"),
    [
        (nn.Linear(3, 1), torch.randn(2, 4), "[..., 3]"),
        (nn.Conv2d(3, 1, 1), torch.randn(2, 4, 5, 5), "[N, 3, *, *]"),
        (nn.Conv2d(3, 1, 1), torch.randn(2, 5, 5, 3), "[N, 3, *, *]: the channels come before height and width"),
        (nn.Conv2d(1, 1, 1), torch.randn(2, 5, 5), "[N, 1, *, *]"),
        (nn.Conv1d(3, 1, 1), torch.randn(2, 4, 5), "[N, 3, *]"),
        (nn.BatchNorm1d(3), torch.randn(2, 4), "[N, 3, ...]"),
        (nn.LayerNorm([2, 3]), torch.randn(2, 4), "[..., 2, 3]"),
        (nn.LSTM(3, 2), torch.randn(2, 5, 4), "[..., 3]"),
        (nn.MultiheadAttention(3, 1), torch.randn(2, 5, 4), "[..., 3]"),
        (nn.Embedding(3, 2), torch.tensor([0, 3]), "indices below 3; the largest is 3"),
        (nn.Embedding(3, 2), torch.randn(2), "int64 or int32"),
        (nn.Linear(3, 1), torch.randn(2, 3).double(), "float32, the type of its weights"),
        (nn.Linear(3, 1), torch.ones(2, 3, dtype=torch.uint8), "float32, the type of its weights"),
    ],
)
def test_what_layers_take(layer: Any, got: Tensor, takes: str) -> None:
    with pytest.raises((RuntimeError, ValueError, IndexError, AssertionError)) as caught:
        layer(got, got, got) if isinstance(layer, nn.MultiheadAttention) else layer(got)
    needed = needed_input(layer, got, caught.value)
    assert needed is not None
    assert needed[0] == takes


@pytest.mark.parametrize(
    ("layer", "got"),
    [
        (nn.Linear(3, 1), torch.randn(3)),
        (nn.Conv2d(3, 1, 1), torch.randn(3, 5, 5)),
        (nn.BatchNorm2d(3), torch.randn(2, 3, 5, 5)),
        (nn.LayerNorm(3), torch.randn(2, 3)),
        (nn.Embedding(3, 2), torch.tensor([0, 2])),
        (nn.LSTM(3, 2), torch.randn(2, 5, 3)),
        (nn.Linear(3, 1).bfloat16(), torch.randn(2, 3).bfloat16()),
    ],
)
def test_what_layers_can_take_is_no_mistake(layer: Any, got: Tensor) -> None:
    layer(got)
    assert needed_input(layer, got, RuntimeError("out of memory")) is None


def test_an_input_that_autocast_has_converted_is_no_mistake() -> None:
    layer, got = nn.Linear(3, 1), torch.randn(2, 3).bfloat16()
    assert needed_input(layer, got, torch.OutOfMemoryError("CUDA out of memory.")) is None


def test_an_error_that_cannot_be_explained_stays_as_it_is(tmp_path: Path) -> None:
    class Broken(Net):
        def forward(self, points: Tensor) -> Tensor:
            raise RuntimeError("out of memory")

    engine: Engine = make_engine(tmp_path, task=Classification(Broken(), nn.CrossEntropyLoss()), train=[GOOD])
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.train()
