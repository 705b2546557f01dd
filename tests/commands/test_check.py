"""`python train.py check`: mistakes in data, models and tasks are found, and named with what to do."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from hydraloop.commands.check import checks
from hydraloop.commands.check.short_runs import NotJudgedError
from hydraloop.data.map_style_loader import build_loader
from hydraloop.engine.engine import Engine
from hydraloop.errors import UserError
from hydraloop.tasks import Classification, LanguageModeling
from hydraloop.tasks.task import Task
from tests.e2e.projects import Done, Project
from tests.faults import planted
from tests.helpers import make_engine


class Noisy(Dataset[Any]):
    """Samples of another data set with noise."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        point, label = self.dataset[index]
        return point + torch.randn(point.shape), label


def points(begin: int, end: int, classes: int = 3) -> TensorDataset:
    inputs = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs[begin:end], torch.arange(begin, end) % classes)


def read(**sets: Any) -> dict[str, checks.Read]:
    return {key: checks.read(build_loader(one, shuffle=False)) for key, one in sets.items()}


def test_samples_in_two_splits_are_found_also_below_an_augmentation() -> None:
    checks.splits(read(train=Noisy(points(0, 200)), val=points(200, 300)))
    with pytest.raises(UserError, match="10 of 110 samples") as found:
        checks.splits(read(train=Noisy(points(0, 200)), val=points(190, 300)))
    assert found.value.key == "data.val"


class Drawn(Dataset[Any]):
    """Samples that are drawn at random."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.randn(4), index % 3


@pytest.mark.parametrize(
    "sets",
    [{"train": points(0, 200), "test/a": Drawn()}, {"train": Drawn(), "val": points(0, 200)}, {"val": points(0, 200)}],
)
def test_splits_that_are_not_judged(sets: dict[str, Any]) -> None:
    with pytest.raises(NotJudgedError, match="another data set, both with indices and without random samples"):
        checks.splits(read(**sets))


def test_texts_that_repeat_everywhere_are_no_leak() -> None:
    words = ["yes", "no", "maybe"]
    checks.splits(read(train=[(words[i % 3], i) for i in range(90)], val=[(words[i % 3], i) for i in range(30)]))


def classifier(tmp_path: Path, outputs: int, labels: Tensor) -> Engine:
    task = Classification(nn.Linear(4, outputs), nn.CrossEntropyLoss())
    return make_engine(tmp_path, task=task, train=[(torch.randn(len(labels), 4), labels)])


@pytest.mark.parametrize(
    ("outputs", "first", "told"), [(3, 1, "labels in data.train are 1, 2, 3"), (5, 0, "has the label 4")]
)
def test_labels_and_outputs_are_compared(tmp_path: Path, outputs: int, first: int, told: str) -> None:
    labels = torch.arange(9) % 3 + first
    engine = classifier(tmp_path, outputs, labels)
    with pytest.raises(UserError, match=told):
        checks.labels(engine, read(train=TensorDataset(torch.randn(9, 4), labels)))
    assert checks.labels(classifier(tmp_path, 3, labels - first), read(train=points(0, 300))).startswith("3 labels")


def test_an_embedding_is_not_taken_for_classes(tmp_path: Path) -> None:
    class Metric(Task):
        def forward(self, batch: Any) -> dict[str, Any]:
            outputs = self.model(batch[0])
            return {"loss": outputs.square().mean(), "outputs": outputs, "targets": batch[1]}

    batch = (torch.randn(9, 4), torch.arange(9))
    engine = make_engine(tmp_path, task=Metric(nn.Linear(4, 2)), train=[batch])
    with pytest.raises(NotJudgedError):
        checks.labels(engine, read(train=TensorDataset(*batch)))


def test_tokens_are_not_compared_with_the_length_of_a_text(tmp_path: Path) -> None:
    batch = (torch.arange(24).reshape(4, 6) % 11, torch.arange(24).reshape(4, 6) % 11)
    task = LanguageModeling(nn.Embedding(11, 11))
    engine = make_engine(tmp_path, task=task, train=[batch])
    with pytest.raises(NotJudgedError):
        checks.labels(engine, read(train=TensorDataset(*batch)))


class Whole(TensorDataset):
    """Returns whole batches."""

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        batch: tuple[Tensor, ...] = self[indices]
        return batch


@pytest.mark.parametrize("dataset", [Noisy(points(0, 9)), Whole(*points(0, 9).tensors)])
def test_ranks_share_the_samples_of_a_batch_with_their_draws(dataset: Any) -> None:
    engine: Any = SimpleNamespace(loaders=SimpleNamespace(train=build_loader(dataset, batch_size=9, shuffle=False)))
    whole = checks.share_of_batch(engine, 0)
    for rank in range(2):
        for all_samples, own in zip(whole, checks.share_of_batch(engine, 0, 2, rank), strict=True):
            assert len(own) == 4
            torch.testing.assert_close(own, all_samples[rank::2], rtol=0, atol=0)


class Hidden(nn.Module):
    """Layers that `parameters()` does not know, beside those that it knows."""

    def __init__(self) -> None:
        super().__init__()
        self.known = nn.Linear(1, 1)
        self.layers = [nn.Linear(1, 1)]
        self.teacher = [nn.Linear(1, 1).requires_grad_(False)]
        self.shared = [self.known]


def test_layers_in_a_plain_list_are_named_and_a_frozen_teacher_is_not() -> None:
    assert list(checks.unregistered(nn.Sequential(Hidden()))) == ["0.layers"]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "project")


def check(project: Project, *overrides: str) -> Done:
    return project.train("check", *overrides)


def test_a_project_that_cannot_be_built_is_one_message(project: Project) -> None:
    planted.write(project.path, "none", 0)
    done = check(project, "task.model._target_=parts.Missing")
    assert done.code == 1
    assert "build       problem     task.model" in done.out


@pytest.mark.slow
def test_a_project_without_a_mistake_passes_and_leaves_no_file(project: Project) -> None:
    planted.write(project.path, "none", 0)
    before = project.files
    done = check(project)
    assert (done.code, done.err) == (0, ""), done.text
    states = [line.split()[:2] for line in done.out.splitlines()]
    assert [name for name, state in states[:-1] if state == "ok"] == [
        "build", "splits", "labels", "loss", "parameters", "ranks", "resume",
    ]  # fmt: skip
    assert project.files == before


@pytest.mark.slow
def test_planted_mistakes_are_found(project: Project) -> None:
    sets = "the test set is a part of the training data"
    planted.write(project.path, sets, 1, "state that is not saved", "a loss that is a sum")
    done = check(project)
    assert done.code == 1
    states = {line.split()[0]: line for line in done.out.splitlines() if " problem " in line}
    assert states.keys() == {"splits", "ranks", "resume"}, done.text
    assert "data.test: " in states["splits"]
    assert "task.loss: gradients of 2 ranks" in states["ranks"]
    assert "task: a resumed run has other losses or weights" in states["resume"]


@pytest.mark.slow
def test_the_error_of_the_rank_that_fails_first_is_told(project: Project) -> None:
    planted.write(project.path, "none", 0)
    line = "        hidden = torch.relu(self.stem(points))\n"
    fails = "        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:\n"
    parts = (project.path / "parts.py").read_text()
    assert line in parts
    project.write("parts.py", parts.replace(line, f"{fails}            raise ValueError('only here')\n{line}"))
    done = check(project)
    assert done.code == 1
    assert "problem     rank 1: ValueError: only here\n" in done.out
