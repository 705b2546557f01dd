"""Metrics of torchmetrics that keep all samples, if some ranks have none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hydraloop.data import InMemoryDataset, build_loader
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.settings import Settings
from hydraloop.tasks import Classification, Regression
from tests.ranks import on_ranks


def validate(distributed: Distributed, samples: int) -> dict[str, float]:
    """Twice, with states of one and two dimensions, of floats and integers, and inside a wrapper."""
    import torchmetrics

    torch.manual_seed(0)
    inputs, classes = torch.randn(samples, 3), torch.arange(samples) % 3
    auroc = {"task": "multiclass", "num_classes": 3, "thresholds": None}
    metrics = {
        "auroc": torchmetrics.AUROC(**auroc),
        "doubled": torchmetrics.AUROC(**auroc) * 2,
        "mean": torchmetrics.Accuracy(task="multiclass", num_classes=3),
    }
    task = Classification(nn.Linear(3, 3), nn.CrossEntropyLoss(), metrics)
    part = {"rank": distributed.rank, "world_size": distributed.world_size}
    loader = build_loader(InMemoryDataset(inputs, classes), shuffle=False, batch_size=2, **part)
    engine = Engine(task=task, loaders=Loaders(None, loader), settings=Settings(device="cpu"), distributed=distributed)
    first = engine.validate()
    assert engine.validate() == first
    return first


@pytest.mark.parametrize(("samples", "world_size"), [(2, 3), (7, 3), (6, 2)])
@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # of classes without samples
def test_ranks_without_samples_do_not_change_the_value(samples: int, world_size: int) -> None:
    pytest.importorskip("torchmetrics")
    alone = validate(Distributed(), samples)
    for metrics in on_ranks(world_size, validate, samples):
        assert metrics == pytest.approx(alone, nan_ok=True)


def gathers(distributed: Distributed, name: str) -> tuple[float, int]:
    """The value of a metric of samples that only rank 0 has, and the number of gathers of its states."""
    import torchmetrics

    met: list[Any] = []

    def gather(value: Any) -> list[Any]:
        met.append(value)
        return distributed.gather(value)

    task = Regression(nn.Linear(1, 1), nn.MSELoss(), {"metric": getattr(torchmetrics, name)()})
    task.reset_metrics()
    if distributed.is_main:
        values = torch.arange(3.0)
        task.update_metrics(torch.zeros(()), values, values**2, 3)
    return task.compute_metrics(distributed.sum, gather)["metric"], len(met)


@pytest.mark.parametrize(
    ("name", "expected", "meetings"), [("SpearmanCorrCoef", 1, 1), ("MeanAbsoluteError", 2 / 3, 0)]
)
def test_only_metrics_with_lists_are_gathered(name: str, expected: float, meetings: int) -> None:
    pytest.importorskip("torchmetrics")
    assert on_ranks(2, gathers, name) == [(pytest.approx(expected, abs=1e-4), meetings)] * 2
