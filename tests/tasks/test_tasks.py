"""Tasks: the loss, the metrics over a data set, and errors for wrong outputs and labels."""

from __future__ import annotations

from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from hydraloop.errors import UserError
from hydraloop.tasks import (
    Accuracy,
    Classification,
    LanguageModeling,
    MeanAbsoluteError,
    Regression,
    Segmentation,
    Task,
)
from tests.helpers import make_engine

LOGITS = torch.tensor([[3.0, 2.0], [0.0, 1.0], [5.0, 4.0]])
CLASSES = torch.tensor([0, 0, 0])


class Returns(nn.Module):
    """A model that returns a fixed value."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, inputs: Tensor) -> Any:
        return self.answer


def classification(**metrics: Any) -> Classification:
    return Classification(nn.Identity(), nn.CrossEntropyLoss(), metrics)


def test_forward_is_the_mean_loss_with_a_gradient() -> None:
    task = Classification(nn.Linear(2, 2), nn.CrossEntropyLoss(), {})
    outputs = task((LOGITS, CLASSES))
    assert set(outputs) == {"loss"}
    assert outputs["loss"].item() == pytest.approx(nn.functional.cross_entropy(task.model(LOGITS), CLASSES).item())
    outputs["loss"].backward()
    assert all(parameter.grad is not None for parameter in task.parameters())


def test_metrics_come_in_order_and_the_loss_is_weighted_by_samples() -> None:
    task = classification(top2=Accuracy(2), accuracy=Accuracy())
    assert task.metric_names == ("top2", "accuracy", "loss")
    task.reset_metrics()
    task.evaluate((LOGITS[:2], CLASSES[:2]))
    outputs = task.evaluate((LOGITS[2:], CLASSES[2:]))
    assert outputs["predictions"].tolist() == [0]
    assert torch.equal(outputs["outputs"], LOGITS[2:])
    metrics = task.compute_metrics()
    assert list(metrics) == ["top2", "accuracy", "loss"]
    assert metrics["top2"] == 1.0
    assert metrics["accuracy"] == pytest.approx(2 / 3)
    assert metrics["loss"] == pytest.approx(nn.functional.cross_entropy(LOGITS, CLASSES).item())


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(3, 2),
        (torch.zeros(3, 2), torch.zeros(4)),
        {"image": torch.zeros(3, 2)},
        (["a", "b", "c"], torch.zeros(3)),
        {"names": ["a", "b", "c"], "id": 7, "image": torch.zeros(3)},
        {"temperature": torch.tensor(0.5), "image": torch.zeros(3)},
        UserDict({"image": torch.zeros(3, 2)}),
        pack_sequence([torch.ones(4, 2), torch.ones(2, 2), torch.ones(1, 2)]),
        ([torch.zeros(3, 2), torch.zeros(3, 4)], torch.zeros(3)),
        ((torch.zeros(1, 1, 1),) * 3, ({"boxes": torch.zeros(2, 1)},) * 3),
    ],
    ids=str,
)
def test_the_samples_are_those_of_the_first_tensor(batch: Any) -> None:
    assert Task(nn.Identity(), nn.MSELoss()).num_samples(batch) == 3


@pytest.mark.parametrize("batch", [["a", "b"], {"text": "a"}, 5, [torch.tensor(5)]], ids=str)
def test_a_batch_without_a_number_of_samples_is_refused(batch: Any) -> None:
    with pytest.raises(UserError, match="num_samples"):
        Task(nn.Identity(), nn.MSELoss()).num_samples(batch)


def test_the_message_about_the_number_of_samples_shows_the_batch() -> None:
    batch = {"ids": [1, 2], "text": "ab"}
    with pytest.raises(UserError, match=r"\(dict with ids: list, text: str\) has no tensor"):
        Task(nn.Identity()).num_samples(batch)


def test_a_batch_without_samples_does_not_count_in_an_evaluation() -> None:
    task = Regression(nn.Identity(), nn.MSELoss(), {"mae": MeanAbsoluteError()})
    task.reset_metrics()
    task.evaluate((torch.zeros(0, 1), torch.zeros(0, 1)))
    task.evaluate((torch.full((2, 1), 3.0), torch.ones(2, 1)))
    assert task.compute_metrics() == {"mae": 2.0, "loss": 4.0}


def test_reset_removes_all_batches() -> None:
    task = classification(accuracy=Accuracy())
    task.reset_metrics()
    task.evaluate((LOGITS[1:2], CLASSES[1:2]))
    task.reset_metrics()
    task.evaluate((LOGITS[:1], CLASSES[:1]))
    assert task.compute_metrics()["accuracy"] == 1.0


def test_metrics_follow_the_model() -> None:
    task = Classification(nn.Linear(2, 2, device="meta"), nn.CrossEntropyLoss(), {"accuracy": Accuracy()})
    task.reset_metrics()
    metric = task.metrics["accuracy"]
    assert isinstance(metric, Accuracy)
    assert metric.sums.device.type == "meta"


def test_the_state_dict_contains_only_the_model() -> None:
    task = Classification(nn.Linear(2, 2), nn.CrossEntropyLoss(), {"accuracy": Accuracy()})
    assert set(task.state_dict()) == {"model.weight", "model.bias"}


def test_a_metric_can_be_removed_but_not_called_loss() -> None:
    assert classification(accuracy=None).metric_names == ("loss",)
    with pytest.raises(UserError, match="another name") as caught:
        classification(loss=Accuracy())
    assert caught.value.key == "metrics.loss"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "a NoneType"),
        (torch.zeros(3), r"a tensor of shape \[3\]"),
        (torch.zeros(3, 1), r"a tensor of shape \[3, 1\]"),  # the loss of one class is always 0
        ({"logits": LOGITS}, "a dict"),
    ],
)
def test_a_model_that_does_not_return_logits_is_refused(answer: Any, said: str) -> None:
    task = Classification(Returns(answer), nn.CrossEntropyLoss(), {})
    task.reset_metrics()
    for method in (task.forward, task.evaluate):
        with pytest.raises(UserError, match=f"Returns returned {said}") as caught:
            method((LOGITS, CLASSES))
        assert caught.value.key == "task.model"


@pytest.mark.parametrize("answer", [None, torch.zeros(3)])
def test_a_regression_of_another_shape_is_refused(answer: Any) -> None:
    task = Regression(Returns(answer), nn.MSELoss(), {})
    task.reset_metrics()
    for method in (task.forward, task.evaluate):
        with pytest.raises(UserError, match=r"targets \[3, 1\]"):
            method((torch.zeros(3, 1), torch.zeros(3, 1)))


def test_regression_is_in_the_targets_unit() -> None:
    task = Regression(nn.Identity(), nn.MSELoss(), {"mae": MeanAbsoluteError()})
    task.reset_metrics()
    outputs = task.evaluate((torch.tensor([[100.0], [200.0]]), torch.tensor([[90.0], [230.0]])))
    assert outputs["predictions"].tolist() == [[100.0], [200.0]]
    assert task.compute_metrics() == {"mae": 20.0, "loss": 500.0}


def test_the_models_number_of_classes() -> None:
    assert classification().num_classes is None
    model = nn.Linear(2, 2)
    model.num_classes = 2  # type: ignore[assignment]
    assert Classification(model, nn.CrossEntropyLoss(), {}).num_classes == 2


INPUTS, LABELS = torch.randn(4, 2), torch.tensor([0, 1, 2, 0])
IMAGES, MASKS = torch.randn(2, 1, 3, 3), torch.zeros(2, 3, 3, dtype=torch.int64)


def with_classes(classes: int = 3) -> Classification:
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
    found = mistake(tmp_path, with_classes(2), (INPUTS, LABELS + 1), in_training)
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
    found = mistake(tmp_path, with_classes(), (INPUTS, torch.tensor(labels)))
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
        make_engine(tmp_path, task=task, train=[(INPUTS, LABELS)]).train()


class GpuError(RuntimeError):
    """What torch raises after an assertion on a GPU, at any later call."""


def test_an_assertion_of_a_gpu_says_how_to_find_the_label(tmp_path: Path) -> None:
    class Asserts(Classification):
        def forward(self, batch: Any) -> dict[str, Any]:
            raise GpuError("CUDA error: device-side assert triggered")

    with pytest.raises(GpuError) as caught:
        make_engine(tmp_path, task=Asserts(nn.Linear(2, 3)), train=[(INPUTS, LABELS)]).train()
    assert any("engine.device=cpu names it" in note for note in caught.value.__notes__)
