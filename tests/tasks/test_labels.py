"""Labels that are not below the number of classes: the key, the problem and a fix, before and in training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hydraloop.errors import UserError
from hydraloop.tasks import Classification, LanguageModeling, Segmentation, Task
from tests.helpers import make_engine

INPUTS, CLASSES = torch.randn(4, 2), torch.tensor([0, 1, 2, 0])
IMAGES, MASKS = torch.randn(2, 1, 3, 3), torch.zeros(2, 3, 3, dtype=torch.int64)


def classification(classes: int = 3) -> Classification:
    return Classification(nn.Linear(2, classes), nn.CrossEntropyLoss())


def mistake(tmp_path: Path, task: Task, batch: Any, in_training: bool = False) -> UserError:
    """Return the mistake that a run says, in its first validation batch or in training."""
    splits = {"train": [batch]} if in_training else {"train": [batch], "val": [batch]}
    engine = make_engine(tmp_path, task=task, **splits)
    with pytest.raises(UserError) as caught:
        engine.train()
    assert caught.value.__cause__ is not None, "the original error is kept"
    assert engine.error is caught.value
    return caught.value


@pytest.mark.parametrize("in_training", [True, False])
def test_labels_that_are_not_below_the_number_of_classes(tmp_path: Path, in_training: bool) -> None:
    found = mistake(tmp_path, classification(2), (INPUTS, CLASSES + 1), in_training)
    assert found.key == "task.model"
    assert found.problem == "the model has 2 classes, 0 to 1, but the labels in a batch are 1, 2, 3"
    assert found.remedy is not None
    assert found.remedy.startswith("Let the model have 4 classes, usually task.model.num_classes=4. Classes begin at 0")


@pytest.mark.parametrize(
    ("labels", "remedy"),
    [
        ([0, 1, 2, 3], "Let the model have 4 classes, "),
        ([0, 1, 2, -1], "no label: +task.loss.ignore_index=-1."),
        ([0, 1, 2, 255], "no label: +task.loss.ignore_index=255."),
    ],
)
def test_the_fix_of_labels(tmp_path: Path, labels: list[int], remedy: str) -> None:
    found = mistake(tmp_path, classification(), (INPUTS, torch.tensor(labels)))
    assert found.remedy is not None
    assert remedy in found.remedy


def test_labels_of_pixels_and_tokens(tmp_path: Path) -> None:
    segmentation = Segmentation(nn.Conv2d(1, 3, 1), 3)
    found = mistake(tmp_path, segmentation, (IMAGES, MASKS + 4))
    assert found.remedy is not None
    assert found.remedy.startswith("Let the model have 5 classes, ")
    found = mistake(tmp_path, segmentation, (IMAGES, MASKS - 1))
    assert "task.ignore_index=-1" in str(found)
    text = LanguageModeling(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 5)))
    found = mistake(tmp_path, text, torch.tensor([[0, 7, 8]]))
    assert found.problem == "the model has 5 classes, 0 to 4, but the labels in a batch are 7, 8"


def test_another_error_of_a_loss_stays_as_it_is(tmp_path: Path) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs[9].sum()

    task = Classification(nn.Linear(2, 3), loss)
    with pytest.raises(IndexError, match="out of bounds"):
        make_engine(tmp_path, task=task, train=[(INPUTS, CLASSES)]).train()


class GpuError(RuntimeError):
    """What torch raises after an assertion on a GPU, at any later call."""


def test_an_assertion_of_a_gpu_says_how_to_find_the_label(tmp_path: Path) -> None:
    class Asserts(Classification):
        def forward(self, batch: Any) -> dict[str, Any]:
            raise GpuError("CUDA error: device-side assert triggered")

    with pytest.raises(GpuError) as caught:
        make_engine(tmp_path, task=Asserts(nn.Linear(2, 3)), train=[(INPUTS, CLASSES)]).train()
    assert any("engine.device=cpu names it" in note for note in caught.value.__notes__)
