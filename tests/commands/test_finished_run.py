"""`python train.py evaluate|predict|export` on finished runs, as typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import hydraloop
from hydraloop.commands import parser
from hydraloop.commands.evaluate import FinishedRun, evaluate
from hydraloop.commands.export import _graph_of
from hydraloop.commands.predict import write
from hydraloop.config import arguments
from hydraloop.data import Digits
from hydraloop.engine.checkpoint.format import evaluation_weights, load
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.tasks import Task
from tests.commands.conftest import SETS, TRAINED
from tests.config.composed import REPOSITORY
from tests.e2e.projects import Done, Project
from tests.ranks import on_ranks


def command(project: Project, name: str, *arguments: str) -> Done:
    return project.train(name, *arguments)


def result(project: Project, run: str = "run") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((project.path / run / "result.json").read_text(encoding="utf-8"))
    return found


def files(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


def predicted(project: Project, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (project.path / name).read_text(encoding="utf-8").splitlines()]


def hits(rows: list[dict[str, Any]], split: str) -> float:
    """The accuracy of logits, as a metric computes it."""
    images = Digits(split)
    assert [row["index"] for row in rows] == list(range(len(images)))
    right = sum(max(range(10), key=row["output"].__getitem__) == int(images[i][1]) for i, row in enumerate(rows))
    return right / len(images)


def test_evaluate_prints_the_metrics_of_the_run_to_the_last_bit(trained: Project) -> None:
    """With averaged weights, the best checkpoint, an augmented test and two data sets. Nothing is written."""
    before = files(trained.path)
    done = command(trained, "evaluate", "run")
    best = Path(result(trained)["best"]["checkpoint"]).name
    assert (done.code, done.err) == (0, f"weights: run/checkpoints/{best}\n")
    expected = result(trained)["test_metrics"]
    assert len(expected) == 4
    assert done.out == json.dumps(expected) + "\n"
    assert trained.python("-m", "hydraloop", "evaluate", "run").out == done.out, "all classes are of hydraloop"
    last = command(trained, "evaluate", "run", "split=val", "checkpoint=last")
    assert json.loads(last.out) == result(trained)["val_metrics"]
    raw = command(trained, "evaluate", "run", "weights=raw")
    assert json.loads(raw.out).keys() == expected.keys()
    assert json.loads(raw.out) != expected
    assert files(trained.path) == before


def test_predictions_are_in_order_and_have_the_metrics_of_the_run(trained: Project) -> None:
    done = command(trained, "predict", "run")
    assert (done.code, done.out) == (0, "predictions.jsonl\n")
    assert done.err.startswith("weights: run/checkpoints/")
    rows = predicted(trained, "predictions.jsonl")
    expected = result(trained)["test_metrics"]
    for name, split in (("small", "test"), ("large", "val")):
        assert hits([row for row in rows if row["data_set"] == name], split) == expected[f"{name}/accuracy"]
    assert command(trained, "predict", "run", "output=p.npz").code == 0
    with np.load(trained.path / "p.npz") as arrays:
        assert sorted(arrays) == ["large/output", "small/output"]
        logits = [row["output"] for row in rows if row["data_set"] == "small"]
        assert np.array_equal(arrays["small/output"], np.array(logits, dtype=np.float32))


def test_predictions_for_other_data_without_targets(trained: Project) -> None:
    """A class of the working directory, with other batches."""
    trained.write(
        "my_project/images.py",
        "from hydraloop.data import Digits\ndef images(split): return [image for image, _ in Digits(split)]\n",
    )
    given = ("data.val._target_=my_project.images.images", "data.loader.batch_size=7", "output=val.jsonl", "split=val")
    done = command(trained, "predict", "run", *given)
    assert done.code == 0, done.err
    labeled = command(trained, "predict", "run", "split=val", "output=labeled.jsonl")
    assert labeled.code == 0, labeled.err
    one, other = predicted(trained, "val.jsonl"), predicted(trained, "labeled.jsonl")
    assert len(one) == len(Digits("val"))
    assert torch.allclose(
        torch.tensor([row["output"] for row in one]), torch.tensor([row["output"] for row in other]), atol=1e-5
    )


def best_weights(project: Project) -> dict[str, torch.Tensor]:
    return evaluation_weights(load(Path(project.path, result(project)["best"]["checkpoint"])))


def test_exported_weights_are_those_of_the_best_checkpoint(trained: Project) -> None:
    done = command(trained, "export", "run", "format=safetensors")
    assert (done.code, done.out) == (0, "model.safetensors\n")
    found, expected = load_file(trained.path / "model.safetensors"), best_weights(trained)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow  # torch.export
def test_an_exported_graph_needs_no_code_and_any_number_of_samples(trained: Project) -> None:
    done = command(trained, "export", "run", "format=pt2", "output=graph.pt2", "checkpoint=last")
    assert (done.code, done.out) == (0, "graph.pt2\n")
    command(trained, "predict", "run", "split=val", "checkpoint=last", "output=last.npz")
    graph = torch.export.load(trained.path / "graph.pt2").module()
    images = torch.stack([Digits("val")[index][0] for index in range(len(Digits("val")))])
    with np.load(trained.path / "last.npz") as arrays:
        assert np.allclose(graph(images).detach().numpy(), arrays["output"], atol=1e-5)
    assert graph(images[:1]).shape == (1, 10)


def test_predictions_of_a_detector_are_lists_of_numbers(tmp_path: Path) -> None:
    found = [{"boxes": torch.ones(2, 4), "labels": torch.tensor([1, 2])}, {"boxes": torch.ones(0, 4)}]
    write(tmp_path / "a.jsonl", iter([("", found)]))
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert rows == [
        {"index": 0, "output": {"boxes": [[1.0] * 4] * 2, "labels": [1, 2]}},
        {"index": 1, "output": {"boxes": []}},
    ]


class Images(torch.nn.Module):
    """Takes images of different sizes, as a detector."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Conv2d(3, 2, 1)

    def forward(self, images: list[torch.Tensor]) -> list[torch.Tensor]:
        return [self.layer(image.unsqueeze(0)).mean((0, 2, 3)) for image in images]


@pytest.mark.parametrize("count", [3, 4])  # as many as channels, and others
def test_the_graph_of_a_model_for_a_list_of_images_keeps_their_sizes(count: int) -> None:
    task = Task(Images()).eval()
    images = [torch.rand(3, 4 + number, 5) for number in range(count)]
    graph = _graph_of(task, (images, [None] * count)).module()
    torch.testing.assert_close(graph(images), task.model(images))


class Sum(torch.nn.Module):
    """Takes two inputs as one argument."""

    def forward(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        return inputs[0] + inputs[1]


def test_the_graph_of_a_model_for_two_inputs_takes_any_number_of_samples() -> None:
    graph = _graph_of(Task(Sum()).eval(), ([torch.rand(5, 3), torch.rand(5, 3)], torch.zeros(5))).module()
    torch.testing.assert_close(graph([torch.ones(7, 3), torch.ones(7, 3)]), torch.full((7, 3), 2.0))


def test_an_output_with_the_name_of_the_position_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="multiple values for keyword argument 'index'"):
        write(tmp_path / "a.jsonl", iter([("", {"index": torch.ones(2)})]))
    write(tmp_path / "a.npz", iter([("", {"index": torch.ones(2)})]))


FAILING = """
from hydraloop import UserError
from hydraloop.tasks import Classification
class Failing(Classification):
    def predict(self, batch):
        if self.engine.distributed.rank == 1:
            raise UserError("rank 1 has another kind of data", key="task")
        return super().predict(batch)
"""


# Ranks. --------------------------------------------------------------------------------------------------------------


@pytest.mark.nightly  # 2 ranks, started four times
def test_ranks_as_trained_give_the_same_bits_and_others_the_same_counts(tmp_path: Path) -> None:
    project = Project.make(tmp_path / "project")
    project.write("conf/data/sets.yaml", SETS)
    done = project.train(*TRAINED, "distributed.nproc_per_node=2")
    assert done.code == 0, done.text
    expected = result(project)["test_metrics"]
    done = command(project, "evaluate", "run")
    assert (done.code, done.out) == (0, json.dumps(expected) + "\n")
    alone = command(project, "evaluate", "run", "distributed.nproc_per_node=1")
    assert alone.err.endswith(" (trained by 2 ranks: the last digits can differ)\n")
    one = json.loads(alone.out)
    for name, value in one.items():
        if name.endswith("loss"):
            assert value == pytest.approx(expected[name], abs=1e-6)
        else:
            assert value == expected[name]
    done = command(project, "predict", "run")
    assert (done.code, done.out) == (0, "predictions.jsonl\n")
    assert done.err.startswith("weights: run/checkpoints/")
    rows = predicted(project, "predictions.jsonl")
    for name, split in (("small", "test"), ("large", "val")):
        assert hits([row for row in rows if row["data_set"] == name], split) == expected[f"{name}/accuracy"]
    project.write("my_project/failing.py", FAILING)
    done = command(project, "predict", "run", "task._target_=my_project.failing.Failing", "output=failed.npz")
    assert (done.code, done.out) == (2, "")
    assert done.err == "error: task: rank 1 has another kind of data\n"
    assert not (project.path / "failed.npz").exists()


def train_digits(distributed: Distributed, run_dir: Path) -> None:
    lines = ["engine.device=cpu", "engine.max_epochs=1", "engine.limit_train_batches=2", "data.val=null"]
    cfg = hydraloop.compose(lines, folder=REPOSITORY)
    hydraloop.build(cfg, run_dir=run_dir, distributed=distributed).train()


def finished(name: str, *words: str) -> FinishedRun:
    args = arguments.read([name, *words])
    found = parser.find(args.overrides)
    assert found is not None
    return FinishedRun(parser.on_run(found, args))


def evaluated(distributed: Distributed, run_dir: Path) -> str:
    return evaluate(finished("evaluate", str(run_dir)), distributed)


@pytest.mark.slow  # 2 ranks
def test_a_run_of_a_launcher_is_evaluated_with_as_many_processes(tmp_path: Path) -> None:
    """Its config does not say how many there were; the checkpoint does."""
    run_dir = tmp_path / "run"
    on_ranks(2, train_digits, run_dir)
    command = finished("evaluate", str(run_dir))
    assert (command.processes, command.trained_by) == (2, 2)
    expected = json.loads((run_dir / "result.json").read_text(encoding="utf-8"))["test_metrics"]
    assert json.loads(on_ranks(2, evaluated, run_dir)[0]) == expected
    assert finished("evaluate", str(run_dir), "distributed.nproc_per_node=1").processes == 1
