"""Values of a task: metrics that are not one number, and what `log` adds to the records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
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
from hydraloop.tasks import Accuracy, Classification, MeanAbsoluteError, Regression
from hydraloop.tasks.values import forms_of
from tests.helpers import EngineWithNeededHooks, make_engine
from tests.ranks import on_ranks

CONFUSION = [[2.0, 1.0, 0.0], [0.0, 3.0, 0.0], [1.0, 0.0, 0.0]]
TARGETS = [0, 0, 0, 1, 1, 1, 2]
PREDICTED = [0, 0, 1, 1, 1, 1, 0]


def validate(distributed: Distributed, run_dir: Path) -> dict[str, float]:
    """Metrics with all forms of values, once on all samples; a rank may have none."""
    import torchmetrics

    shared = {"task": "multiclass", "num_classes": 3}
    metrics = {
        "confusion": torchmetrics.ConfusionMatrix(**shared),
        "recall": torchmetrics.Recall(**shared, average="none"),
        "both": torchmetrics.MetricCollection(
            {"micro": torchmetrics.Accuracy(**shared, average="micro"), "f1": torchmetrics.F1Score(**shared)}
        ),
        "accuracy": Accuracy(),
    }
    task = Classification(nn.Identity(), nn.CrossEntropyLoss(), metrics)
    logits = nn.functional.one_hot(torch.tensor(PREDICTED), 3).float()
    part = {"rank": distributed.rank, "world_size": distributed.world_size}
    val = build_loader(InMemoryDataset(logits, torch.tensor(TARGETS)), shuffle=False, batch_size=7, **part)
    engine = EngineWithNeededHooks(
        task=task,
        loaders=Loaders(None, val),
        hooks={"logger": LoggerHook()},
        settings=Settings(device="cpu"),
        distributed=distributed,
        run_dir=run_dir,
    )
    found = engine.validate()
    assert tuple(found) == task.metric_names
    assert list(task.pictures) == ["confusion"]
    assert task.pictures["confusion"].tolist() == CONFUSION
    assert [task.higher_is_better(name) for name in ("recall/1", "accuracy", "confusion")] == [True, True, None]
    with pytest.raises(KeyError):
        task.higher_is_better("recal")
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_mapping_a_vector_and_a_matrix(tmp_path: Path, world_size: int) -> None:
    pytest.importorskip("torchmetrics")
    results = on_ranks(2, validate, tmp_path) if world_size == 2 else [validate(Distributed(), tmp_path)]
    for found in results:
        assert {name: value for name, value in found.items() if name not in ("both/f1", "loss")} == pytest.approx(
            {"recall/0": 2 / 3, "recall/1": 1.0, "recall/2": 0.0, "both/micro": 5 / 7, "accuracy": 5 / 7}
        )
    objects, numbers = (json.loads(line) for line in (tmp_path / FILENAME).read_text().splitlines())
    assert objects["objects"] == [{"kind": "image", "name": "confusion", "path": "media/val/confusion_iter_0.png"}]
    assert (tmp_path / "media/val/confusion_iter_0.png").stat().st_size > 500
    assert numbers["recall/0"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, {"m": 3.0}),
        (torch.tensor([[2.0]]), {"m": 2.0}),
        (np.float32(0.5), {"m": 0.5}),
        (np.array([1, 2]), {"m/0": 1, "m/1": 2}),
        ({"a": {"b": torch.tensor([1.0, 2.0])}, "c": 1}, {"m/a/b/0": 1.0, "m/a/b/1": 2.0, "m/c": 1.0}),
        ({"a": torch.eye(2)}, {"m/a": [[1.0, 0.0], [0.0, 1.0]]}),
        ({"a": torch.zeros(0), "b": torch.zeros(0, 3), "c": torch.zeros(3, 0)}, {}),
    ],
)
def test_the_parts_of_a_value(value: Any, expected: dict[str, Any]) -> None:
    assert {name: part.tolist() for name, part in forms_of("m", value)} == expected


@pytest.mark.parametrize(
    ("value", "said"), [(torch.zeros(2, 2, 2), r"shape \[2, 2, 2\]"), ((1, 2), "a tuple"), ("x", "a str")]
)
def test_another_form_is_refused(value: Any, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        dict(forms_of("f1", value))
    assert caught.value.key == "task.metrics.f1"


class Parts(Accuracy):
    """Two numbers."""

    def value(self, sums: Tensor) -> Any:
        return {"a": 1.0, "b": 2.0}


def test_a_part_of_a_metric_has_precedence_over_a_scalar() -> None:
    task = Classification(nn.Identity(), nn.CrossEntropyLoss(), {"m": Parts()})
    task.reset_metrics()
    task.log("m/a", 5.0)
    task.evaluate((torch.eye(3), torch.arange(3)))
    metrics = task.compute_metrics()
    assert list(metrics) == ["m/a", "m/b", "loss"]
    assert metrics["m/a"] == 1


def test_no_graph_is_kept() -> None:
    (part,) = (part for _, part in forms_of("m", torch.ones((), requires_grad=True) * 2))
    assert isinstance(part, Tensor)
    assert not part.requires_grad


class Logs(Regression):
    """Logs the mean of the inputs, as a tensor with a graph and as a number, and a constant twice."""

    def call_model(self, inputs: Any, targets: Tensor) -> Tensor:
        outputs = super().call_model(inputs, targets)
        self.log("input", inputs.mean() + 0 * outputs.mean())
        self.log("as_number", inputs.mean().item())
        self.log("constant", 1)
        self.log("constant", torch.tensor([2]))
        return outputs


def train(distributed: Distributed, run_dir: Path, samples: int) -> None:
    """One epoch with a record at its end, validation and test, each on other data."""
    task = Logs(nn.Linear(1, 1), nn.MSELoss())
    part = {"rank": distributed.rank, "world_size": distributed.world_size}

    def loader(begin: float, *, shuffle: bool) -> Any:
        inputs = torch.arange(float(begin), begin + samples).unsqueeze(1)
        return build_loader(InMemoryDataset(inputs, inputs), shuffle=shuffle, batch_size=2, seed=1, **part)

    loaders = Loaders(loader(0, shuffle=True), loader(100, shuffle=False), loader(200, shuffle=False))
    make_engine(
        run_dir,
        {"runtime_info": RuntimeInfoHook(), "logger": LoggerHook(interval=len(loaders.train or ()))},
        loaders=loaders,
        task=task,
        lr=0.0,
        distributed=distributed,
        max_epochs=2,
        val_interval=2,
        accumulate=2,
    ).train()


@pytest.mark.parametrize("samples", [5, 7])  # with two ranks and 5 samples, one rank has none in the last batch
@pytest.mark.parametrize("world_size", [1, 2])
def test_all_samples_have_the_same_weight(tmp_path: Path, world_size: int, samples: int) -> None:
    if world_size == 1:
        train(Distributed(), tmp_path, samples)
    else:
        on_ranks(world_size, train, tmp_path, samples)
    records = [json.loads(line) for line in (tmp_path / FILENAME).read_text().splitlines()]
    assert [record["mode"] for record in records] == ["train", "train", "val", "test"]
    mean = (samples - 1) / 2
    for record, expected in zip(records, (mean, mean, 100 + mean, 200 + mean), strict=True):
        assert record["input"] == pytest.approx(expected, rel=1e-6)
        assert record["as_number"] == pytest.approx(expected, rel=1e-6)
        assert record["constant"] == 2


class Both(Regression):
    """Logs and returns parameters, numbers of numpy, small types, and the same name."""

    def forward(self, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        outputs = self.model(inputs)
        bias = self.model.bias.reshape(()) if self.log_it else self.bias
        returned: dict[str, Any] = {"bias": bias, "steps": self.count, "twice": 0.0}
        if self.log_it:
            self.log("bias", returned.pop("bias"))
            self.log("steps", returned.pop("steps"))
            self.log("numpy", np.float32(2))
            self.log("half", torch.tensor(300, dtype=torch.float16))
        else:
            returned |= {"numpy": np.array(2.0), "half": torch.tensor(300, dtype=torch.float16), "text": np.str_("2")}
        self.log("twice", 1.0)
        if self.training:
            with torch.no_grad():
                self.count += 1
        return {"loss": outputs.mean(), "outputs": outputs, "targets": targets, **returned}


@pytest.mark.parametrize("log_it", [False, True])
def test_values_that_change_later_numpy_and_half_precision(tmp_path: Path, log_it: bool) -> None:
    task = Both(nn.Linear(1, 1), nn.MSELoss())
    task.log_it, task.bias = log_it, nn.Parameter(torch.zeros(()))  # type: ignore[assignment]
    task.register_buffer("count", torch.zeros((), dtype=torch.float64))
    nn.init.zeros_(task.model.bias)  # type: ignore[arg-type]
    batches = [(torch.ones(256, 1), torch.ones(256, 1))] * 4

    class Moves(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            with torch.no_grad():
                task.bias += 1
                task.model.bias += 1  # type: ignore[operator]

    make_engine(
        tmp_path,
        {"runtime_info": RuntimeInfoHook(), "logger": LoggerHook(interval=4)},
        train=batches,
        val=batches,
        task=task,
        optimizer=Moves(task.parameters(), lr=1.0),
    ).train()
    train, val = (json.loads(line) for line in (tmp_path / FILENAME).read_text().splitlines())
    # A returned value is read after the iteration, a logged one when it is logged.
    assert (train["bias"], train["steps"]) == ((1.5, 1.5) if log_it else (2.5, 2.5))
    assert (val["bias"], val["steps"]) == (4, 4)
    for record in (train, val):
        assert (record["twice"], record["numpy"], record["half"]) == (1, 2, 300)
        assert "text" not in record


class CustomEvaluate(Regression):
    """Logs in a custom `evaluate`, before or after `update_metrics`."""

    late = False

    def evaluate(self, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        if not self.late:
            self.log("input", inputs.mean())
        self.update_metrics(targets.mean(), inputs, targets, len(inputs))
        if self.late:
            self.log("input", inputs.mean())
        return {"loss": targets.mean()}


def test_log_in_a_custom_evaluate() -> None:
    task = CustomEvaluate(nn.Identity(), metrics={"mae": MeanAbsoluteError()})
    for late in (False, True):
        task.late = late
        task.reset_metrics()
        for values in ([1.0, 2.0], [6.0]):
            task.evaluate((torch.tensor(values), torch.tensor(values)))
        if not late:
            assert task.compute_metrics() == {"mae": 0, "loss": 3, "input": 3}
            continue
        with pytest.raises(UserError, match=r"evaluate logs input and calls no update_metrics after it"):
            task.compute_metrics()


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("loss", 1.0, "every record already has an entry 'loss'"),
        ("data_time", 1.0, "every record already has an entry 'data_time'"),
        ("norms", torch.zeros(2), r"log\('norms', …\) got a tensor of shape \[2\], not one number"),
        ("norms", "1", "got a str, not one number"),
    ],
)
def test_what_cannot_be_logged(name: str, value: Any, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        Regression(nn.Identity()).log(name, value)
