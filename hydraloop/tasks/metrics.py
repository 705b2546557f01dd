"""Metrics over a whole data set, with the interface of torchmetrics. Importing torchmetrics takes 0.9 s."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

IGNORED = -100
"""The target of a token that is ignored: torch's default `ignore_index`."""


class Metric(Protocol):
    """What a task needs of a metric. Every `torchmetrics.Metric` has it."""

    @property
    def higher_is_better(self) -> bool | None:
        """Whether high values are good; None: neither high nor low ones."""

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch. No host sync."""

    def compute(self) -> Any:
        """Return the value over all batches since the last `reset`; over all ranks if possible.

        A number or scalar tensor, a vector, a matrix, or a mapping of them.
        """

    def reset(self) -> None:
        """Remove all batches."""

    def to(self, device: torch.device) -> Any:
        """Move the state to the device of the batches."""


class SumMetric(ABC):
    """A metric that is a function of sums over the samples, so that ranks only have to add their sums.

    A subclass gives the number of sums, adds to `self.sums` in `update`, and computes the metric in `value`.
    """

    higher_is_better: bool | None = None

    def __init__(self, size: int) -> None:
        self.sums = torch.zeros(size, dtype=torch.float64)

    @abstractmethod
    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch to the sums. No host sync."""

    @abstractmethod
    def value(self, sums: Tensor) -> Any:
        """Return the metric, usually a scalar, from the sums `[size]` over all samples; NaN without samples.

        No host sync.
        """

    def compute(self) -> Any:
        """Return the metric over this rank's samples."""
        return self.value(self.sums)

    def reset(self) -> None:
        """Remove all batches."""
        self.sums.zero_()

    def to(self, device: torch.device) -> SumMetric:
        """Move the sums, in double precision if the device supports it."""
        self.sums = self.sums.to(device, sums_dtype(device))
        return self


def sums_dtype(device: torch.device) -> torch.dtype:
    """Return double precision, except for Apple's GPUs, which do not support it."""
    return torch.float32 if device.type == "mps" else torch.float64


class _Mean(SumMetric):
    """A sum and a number, whose quotient is the metric."""

    def __init__(self) -> None:
        super().__init__(2)

    def value(self, sums: Tensor) -> Tensor:
        """Return the sum divided by the number."""
        return sums[0] / sums[1]


class Accuracy(_Mean):
    """The fraction of classes that are among the `top_k` highest outputs, 0..1 (micro average).

    Every element of the targets counts once, each sample or each pixel of a segmentation, except those of
    `ignore_index`.

    Args:
        top_k: at least 1.

    Raises:
        ValueError: `top_k` is below 1.
    """

    higher_is_better = True
    ignore_index = IGNORED
    """The class that does not count; a `Segmentation` sets its own."""

    def __init__(self, top_k: int = 1) -> None:
        if top_k < 1:
            raise ValueError(f"top_k must be at least 1, not {top_k}")
        super().__init__()
        self.top_k = top_k

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch: outputs `[N, C, ...]` (logits or probabilities) and classes `[N, ...]`."""
        if self.top_k == 1:
            best = preds.argmax(1, keepdim=True)
        else:
            best = preds.topk(min(self.top_k, preds.shape[1]), dim=1).indices
        _check_shapes(best[:, 0], target)
        counts = target != self.ignore_index
        self.sums[0] += ((best == target.unsqueeze(1)).any(1) & counts).sum()
        self.sums[1] += counts.sum()


class BitsPerToken(_Mean):
    """The mean negative log-likelihood of the next token in bits: the size to which a token could be compressed.

    If tokens are bytes, it is bits per byte, and a model that has learned nothing has 8.
    """

    higher_is_better = False

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch: logits `[N, T, V]` and tokens `[N, T]`, without those of -100."""
        flat = target.flatten()
        nats = functional.cross_entropy(preds.flatten(0, 1).float(), flat, ignore_index=IGNORED, reduction="sum")
        self.sums[0] += nats / math.log(2)
        self.sums[1] += (flat != IGNORED).sum()


class TokenAccuracy(_Mean):
    """The fraction of tokens to which the model gives the highest probability, 0..1."""

    higher_is_better = True

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch: logits `[N, T, V]` and tokens `[N, T]`, without those of -100."""
        best = preds.argmax(-1)
        _check_shapes(best, target)
        self.sums[0] += (best == target).sum()
        self.sums[1] += (target != IGNORED).sum()


class MeanAbsoluteError(_Mean):
    """The mean of `|output - target|` over all values, in the unit of the targets."""

    higher_is_better = False

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch: outputs and targets of the same shape `[N, ...]`."""
        _check_shapes(preds, target)
        self.sums[0] += (preds - target).to(self.sums.dtype).abs().sum()
        self.sums[1] += target.numel()


def _check_shapes(preds: Tensor, target: Tensor) -> None:
    """Require equal shapes, because broadcasting would make N x N values of N."""
    if preds.shape != target.shape:
        raise ValueError(f"predictions {list(preds.shape)} and targets {list(target.shape)} differ in shape")
