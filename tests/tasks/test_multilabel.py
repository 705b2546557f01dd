"""Multi-label classification: the loss, the metrics of probabilities, and errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig
from torch import nn
from torch.nn import functional

import hydraloop
from hydraloop.data import InMemoryDataset, build_loader
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.run import Settings
from hydraloop.errors import UserError
from hydraloop.tasks import MultiLabel
from hydraloop.tasks.building import build_task
from tests.helpers import EngineWithNeededHooks
from tests.ranks import on_ranks

LINES = [
    "task=multilabel",
    "task.model=null",
    "+task.model={_target_: torch.nn.Linear, in_features: 4, out_features: 3}",
    "task.num_classes=3",
]
INPUTS = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(2, (7, 3), generator=torch.Generator().manual_seed(1))


def validated(distributed: Distributed, cfg: DictConfig, batch: int) -> dict[str, float]:
    """Validate a model whose logits are all between 0 and 1, which torchmetrics could take for probabilities."""
    task = build_task(cfg)
    with torch.no_grad():
        for parameter in task.parameters():
            parameter.fill_(0.1)
        task.model.bias += 0.3
    part = {"rank": distributed.rank, "world_size": distributed.world_size}
    loader = build_loader(InMemoryDataset(INPUTS, LABELS), shuffle=False, batch_size=batch, **part)
    engine = EngineWithNeededHooks(
        task=task, loaders=Loaders(None, loader), settings=Settings(device="cpu"), distributed=distributed
    )
    return engine.validate()


def test_metrics_do_not_depend_on_batches_and_ranks() -> None:
    logits = (0.1 * INPUTS.sum(1, keepdim=True) + 0.4).expand(7, 3)
    assert ((logits > 0) & (logits < 1)).all()  # so every label is predicted
    positive = LABELS.sum(0)
    expected = {
        "f1": (2 * positive / (7 + positive)).mean().item(),
        "loss": functional.binary_cross_entropy_with_logits(logits, LABELS.float()).item(),
    }
    cfg = hydraloop.compose(LINES, folder=Path(__file__).parents[2])
    runs = [validated(Distributed(), cfg, 7), validated(Distributed(), cfg, 2), *on_ranks(2, validated, cfg, 2)]
    for metrics in runs:
        assert metrics == pytest.approx(expected, rel=1e-5)


def test_the_loss_takes_labels_of_any_type_and_trains() -> None:
    task = MultiLabel(nn.Linear(4, 3), 3)
    losses = [task((INPUTS, labels))["loss"] for labels in (LABELS, LABELS.float(), LABELS.bool())]
    assert losses[0] == losses[1] == losses[2]
    losses[0].backward()
    assert all(parameter.grad is not None for parameter in task.parameters())
    found = task.evaluate((INPUTS, LABELS))
    torch.testing.assert_close(found["predictions"], (task.model(INPUTS) > 0).long())


@pytest.mark.parametrize(("outputs", "labels"), [(2, (7, 3)), (3, (7, 4)), (3, (7,))])
def test_other_shapes_are_refused(outputs: int, labels: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"both are \[7, 3\]") as caught:
        MultiLabel(nn.Linear(4, outputs), 3)((INPUTS, torch.ones(labels)))
    assert caught.value.key == "task.model"
