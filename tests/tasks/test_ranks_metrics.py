"""Metrics of torchmetrics that keep all samples, on ranks with different numbers of samples."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hydraloop.data import InMemoryDataset, build_loader
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.run import Settings
from hydraloop.tasks import Classification
from tests.helpers import EngineWithNeededHooks
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
    engine = EngineWithNeededHooks(
        task=task, loaders=Loaders(None, loader), settings=Settings(device="cpu"), distributed=distributed
    )
    first = engine.validate()
    assert engine.validate() == first
    return first


@pytest.mark.parametrize(("samples", "world_size"), [(3, 3), (7, 3), (6, 2)])
@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # of classes without samples
def test_the_number_of_ranks_does_not_change_the_value(samples: int, world_size: int) -> None:
    pytest.importorskip("torchmetrics")
    alone = validate(Distributed(), samples)
    for metrics in on_ranks(world_size, validate, samples):
        assert metrics == pytest.approx(alone, nan_ok=True)
