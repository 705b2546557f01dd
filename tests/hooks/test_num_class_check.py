"""NumClassCheckHook: numbers that differ, and warnings if there is nothing to compare."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, Subset

from examples.contrastive.augmented import Augmented
from hydraloop.data import InMemoryDataset, build_loader
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import Loaders
from hydraloop.errors import UserError
from hydraloop.hooks.num_class_check import NumClassCheckHook
from hydraloop.tasks import Classification
from hydraloop.tasks.task import Task
from tests.helpers import Recorder
from tests.hooks import tiny_runs

TWO, THREE = ["cat", "dog"], ["cat", "dog", "cow"]


class Head(nn.Linear):
    """Logits, and the number of them."""

    def __init__(self, num_classes: Any) -> None:
        super().__init__(4, 2)
        self.num_classes = num_classes

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs.flatten(1))


class Net(nn.Module):
    """A model whose number of classes is in its head, and that may have another head for something else."""

    def __init__(self, num_classes: Any, rpn: int | None = None, mask: int | None = None) -> None:
        super().__init__()
        self.head = Head(num_classes)
        if rpn is not None:
            self.rpn_head = Head(rpn)
        if mask is not None:
            self.mask_head = Head(mask)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.head(inputs)
        return logits


class Counting(Task):
    """A task that has the number itself."""

    num_classes = 3


def data(classes: Any) -> InMemoryDataset:
    made = InMemoryDataset(torch.zeros(4, 1, 2, 2), torch.arange(4) % 2)
    made.classes = classes
    return made


def engine_of(
    run_dir: Path,
    model: nn.Module,
    train: Dataset[Any],
    val: Dataset[Any] | None = None,
    test: Dataset[Any] | None = None,
    *,
    task: Callable[..., Task] = Classification,
    ignore: list[str] | str | None = None,
) -> tuple[Engine, Recorder]:
    loaders = [None if one is None else build_loader(one, shuffle=False, batch_size=2) for one in (train, val, test)]
    recorder = Recorder()
    hooks: dict[str, Hook] = {"num_class_check": NumClassCheckHook(ignore=ignore), "recorder": recorder}
    loaded = Loaders(*loaders)
    return tiny_runs.engine_of(
        run_dir, hooks, task=task(model, nn.CrossEntropyLoss()), loaders=loaded, max_epochs=1
    ), recorder


def error_of(*arguments: Any, **options: Any) -> UserError:
    engine, recorder = engine_of(*arguments, **options)
    with pytest.raises(UserError) as caught:
        engine.train()
    assert not [point for point in recorder.trace if "iter" in point], "before the first iteration"
    return caught.value


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_another_number_of_classes_is_refused_with_both_numbers_and_where_they_are(split: str, tmp_path: Path) -> None:
    sets = {name: data(THREE if name == split else TWO) for name in ("train", "val", "test")}
    error = error_of(tmp_path, Head(2), *sets.values())
    assert error.key == "task.model.num_classes"
    assert error.problem == f"it is 2, but InMemoryDataset of data.{split} has 3 classes"
    assert error.remedy == (
        "Use task.model.num_classes=3, or the data set that the model is for. If this number means something else: "
        "hooks.num_class_check.ignore=[rpn_head,model]."
    )


def test_the_same_number_passes_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine, _ = engine_of(tmp_path, Head(2), data(TWO), data(TWO), data(TWO))
    assert engine.train().status == "finished"
    assert warnings(caplog) == []


def test_an_evaluation_without_training_is_checked(tmp_path: Path) -> None:
    engine, _ = engine_of(tmp_path, Head(2), data(TWO), data(THREE))
    with pytest.raises(UserError, match=r"data.val has 3 classes"):
        engine.validate()


def test_a_head_inside_the_model_counts_and_is_named(tmp_path: Path) -> None:
    error = error_of(tmp_path, Net(2, rpn=1), data(THREE))
    assert error.key == "task.model.head.num_classes"


def test_a_tasks_own_number_counts(tmp_path: Path) -> None:
    error = error_of(tmp_path, Net(None), data(TWO), task=Counting)
    assert (error.key, "it is 3" in error.problem) == ("task.num_classes", True)


def test_ignored_are_rpn_heads_or_what_is_named(tmp_path: Path) -> None:
    engine_of(tmp_path, Net(2, rpn=1), data(TWO))[0].train()
    assert error_of(tmp_path, Net(2, rpn=1), data(TWO), ignore=[]).key == "task.model.rpn_head.num_classes"
    assert error_of(tmp_path, Net(2, mask=1), data(TWO)).key == "task.model.mask_head.num_classes"
    engine_of(tmp_path, Net(2, mask=1), data(TWO), ignore=["mask_head"])[0].train()


def test_the_error_shows_how_to_ignore_a_number(tmp_path: Path) -> None:
    error = error_of(tmp_path, Net(2, mask=1), data(TWO))
    assert str(error.remedy).endswith("hooks.num_class_check.ignore=[rpn_head,model.mask_head].")
    engine_of(tmp_path, Net(2, mask=1), data(TWO), ignore=["rpn_head", "model.mask_head"])[0].train()
    assert "ignore" not in str(error_of(tmp_path, Net(None), data(TWO), task=Counting).remedy)


def test_numbers_of_numpy_count(tmp_path: Path) -> None:
    assert "it is 7, but" in error_of(tmp_path, Head(np.int64(7)), data(TWO)).problem


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda inside: Subset(inside, range(4)),
        lambda inside: Augmented(inside),
        lambda inside: ConcatDataset([data(TWO), Subset(inside, range(4))]),
    ],
)
def test_wrappers_are_looked_through(wrapped: Callable[[Any], Any], tmp_path: Path) -> None:
    assert "has 3 classes" in str(error_of(tmp_path, Head(2), wrapped(data(THREE))))


def test_of_a_wrapper_with_classes_of_its_own_those_count(tmp_path: Path) -> None:
    coarse = Subset(data([*THREE, "hen"]), range(4))
    coarse.classes = ["mammal", "bird"]  # type: ignore[attr-defined]
    engine_of(tmp_path, Head(2), coarse)[0].train()


@pytest.mark.parametrize("number", [None, True, "2", 2.0])
def test_a_model_without_a_number_is_one_warning(number: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine_of(tmp_path, Head(number), data(TWO), data(THREE))[0].train()
    assert warnings(caplog) == [
        "hooks.num_class_check: nothing was checked: no module of Classification has num_classes"
    ]


def test_data_sets_without_classes_are_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine_of(tmp_path, Head(2), data(None), data(TWO), data(None))[0].train()
    assert warnings(caplog) == [
        "hooks.num_class_check: not checked: the data set of data.train has no classes, "
        "the data set of data.test has no classes"
    ]
