"""Metrics whose value is not one number: mappings, vectors and matrices."""

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
from hydraloop.engine.run import Settings
from hydraloop.errors import UserError
from hydraloop.files.metrics_log import FILENAME
from hydraloop.hooks import LoggerHook
from hydraloop.tasks import Accuracy, Classification
from hydraloop.tasks.values import forms_of
from tests.helpers import EngineWithNeededHooks
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
