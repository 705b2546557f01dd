"""The built-in metrics: by hand, and against torchmetrics."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from hydraloop.tasks import Accuracy, MeanAbsoluteError, SumMetric
from hydraloop.tasks.metrics import TokenAccuracy

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
