"""The built-in metrics: by hand, and against torchmetrics."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn import functional

import hydraloop
from hydraloop.data import InMemoryDataset, build_loader
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.run_parts import Settings
from hydraloop.errors import UserError
from hydraloop.tasks import Accuracy, Classification, MeanAbsoluteError, MultiLabel, SumMetric
from hydraloop.tasks.building import build_task
from hydraloop.tasks.metrics import TokenAccuracy
from tests.helpers import EngineWithNeededHooks
from tests.ranks import on_ranks

LOGITS = torch.tensor([[3.0, 2.0, 1.0], [0.0, 1.0, 2.0], [5.0, 4.0, 0.0], [0.0, 9.0, 1.0]])
CLASSES = torch.tensor([0, 1, 2, 1])


@pytest.mark.parametrize(("top_k", "expected"), [(1, 0.5), (2, 0.75), (3, 1.0), (9, 1.0)])
def test_accuracy_by_hand(top_k: int, expected: float) -> None:
    metric = Accuracy(top_k)
    metric.update(LOGITS, CLASSES)
    assert metric.compute().item() == expected


@pytest.mark.parametrize("top_k", [1, 2])
def test_accuracy_of_dense_outputs_counts_their_elements(top_k: int) -> None:
    """A segmentation of 4 images of 8 x 8, of which a quarter is wrong."""
    target = torch.randint(3, (4, 8, 8), generator=torch.Generator().manual_seed(0))
    logits = (
        torch.nn.functional.one_hot(target, 3).movedim(-1, 1).float() + torch.tensor([0.0, 0.1, 0.2])[:, None, None]
    )
    wrong = target.clone()
    wrong[0] = logits[0].argmin(0)  # not among the two highest
    metric = Accuracy(top_k)
    metric.update(logits[:2], wrong[:2])
    metric.update(logits[2:], wrong[2:])
    assert metric.compute().item() == 0.75


@pytest.mark.parametrize(
    ("metric", "preds", "target"),
    [
        (Accuracy(), torch.zeros(3, 2), torch.zeros(3, 1)),
        (Accuracy(2), torch.zeros(3, 3), torch.zeros(3, 3)),
        (TokenAccuracy(), torch.zeros(3, 3, 5), torch.zeros(3)),
        (MeanAbsoluteError(), torch.zeros(3), torch.zeros(3, 1)),
    ],
)
def test_shapes_that_would_broadcast_are_refused(metric: SumMetric, preds: Tensor, target: Tensor) -> None:
    with pytest.raises(ValueError, match="differ in shape"):
        metric.update(preds, target)


def test_accuracy_refuses_a_top_k_below_1() -> None:
    with pytest.raises(ValueError, match="top_k"):
        Accuracy(0)


@pytest.mark.parametrize("metric", [Accuracy(), MeanAbsoluteError()])
def test_the_value_without_samples_is_nan(metric: SumMetric) -> None:
    assert math.isnan(metric.compute().item())


@pytest.mark.slow
def test_importing_tasks_imports_no_torchmetrics() -> None:
    code = "import sys, hydraloop.tasks\nassert 'torchmetrics' not in sys.modules\n"
    subprocess.run([sys.executable, "-c", code], check=True)


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
