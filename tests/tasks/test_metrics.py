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


def test_against_torchmetrics() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    generator = torch.Generator().manual_seed(0)
    logits, classes = torch.randn(50, 7, generator=generator), torch.randint(7, (50,), generator=generator)
    values = torch.randn(50, generator=generator) * 80 + 150
    guesses = values + torch.randn(50, generator=generator) * 30
    pairs: list[tuple[SumMetric, object, Tensor, Tensor]] = [
        (
            Accuracy(k),
            torchmetrics.Accuracy(task="multiclass", num_classes=7, top_k=k, average="micro"),
            logits,
            classes,
        )
        for k in (1, 3)
    ]
    pairs += [
        (MeanAbsoluteError(), torchmetrics.MeanAbsoluteError(), guesses, values),
    ]
    for own, theirs, preds, target in pairs:
        assert own.higher_is_better == theirs.higher_is_better  # type: ignore[attr-defined]
        for chunk in (slice(0, 20), slice(20, 50)):
            own.update(preds[chunk], target[chunk])
            theirs.update(preds[chunk], target[chunk])  # type: ignore[attr-defined]
        assert own.compute().item() == pytest.approx(theirs.compute().item(), rel=1e-5), own  # type: ignore[attr-defined]


@pytest.mark.parametrize("metric", [Accuracy(), MeanAbsoluteError()])
def test_the_value_is_the_same_for_sums_and_means_over_ranks(metric: SumMetric) -> None:
    if isinstance(metric, Accuracy):
        metric.update(LOGITS, CLASSES)
    else:
        metric.update(torch.tensor([1.0, 2.0, 5.0]), torch.tensor([1.0, 3.0, 4.0]))
    assert metric.value(metric.sums * 4).item() == pytest.approx(metric.value(metric.sums).item())


@pytest.mark.parametrize("metric", [Accuracy(), MeanAbsoluteError()])
def test_the_value_without_samples_is_nan(metric: SumMetric) -> None:
    assert math.isnan(metric.compute().item())


@pytest.mark.slow
def test_importing_tasks_imports_no_torchmetrics() -> None:
    code = "import sys, hydraloop.tasks\nassert 'torchmetrics' not in sys.modules\n"
    subprocess.run([sys.executable, "-c", code], check=True)
