"""Metrics over a whole data set. The face is that of torchmetrics, whose classes work too; importing it costs 0.9 s."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional

IGNORED = -100
"""The target of a token that counts for nothing; torch's own `ignore_index`."""


class Metric(Protocol):
    """What a task needs of a metric; every `torchmetrics.Metric` has it."""

    @property
    def higher_is_better(self) -> bool | None:
        """Which values are good; None where neither end is."""

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Take a batch in; no host sync."""

    def compute(self) -> Any:
        """The value over all batches since the last `reset`, a scalar tensor; over all ranks if it can."""

    def reset(self) -> None:
        """Forget all batches."""

    def to(self, device: torch.device) -> Any:
        """Move the state to the device of the batches."""


class SumMetric(ABC):
    """A metric that is a function of sums over the samples, so that ranks only have to add theirs.

    A subclass says how many sums there are, adds to `self.sums` in `update`, and makes the value of them in `value`.
    """

    higher_is_better: bool | None = None

    def __init__(self, size: int) -> None:
        self.sums = torch.zeros(size, dtype=torch.float64)

    @abstractmethod
    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch to the sums; no host sync."""

    @abstractmethod
    def value(self, sums: Tensor) -> Tensor:
        """The metric, a scalar, of the sums `[size]` over all samples; nan where there are none. No host sync."""

    def compute(self) -> Tensor:
        """The metric over this rank's samples, a scalar."""
        return self.value(self.sums)

    def reset(self) -> None:
        """Forget all batches."""
        self.sums.zero_()

    def to(self, device: torch.device) -> SumMetric:
        """Move the sums, in double precision where the device has it."""
        self.sums = self.sums.to(device, sums_dtype(device))
        return self


def sums_dtype(device: torch.device) -> torch.dtype:
    """Double precision, except on Apple's GPUs, which have none."""
    return torch.float32 if device.type == "mps" else torch.float64


class Accuracy(SumMetric):
    """The share of samples whose class is among the `top_k` highest outputs, 0..1 (micro average).

    Args:
        top_k: at least 1.

    Raises:
        ValueError: `top_k` below 1.
    """

    higher_is_better = True

    def __init__(self, top_k: int = 1) -> None:
        if top_k < 1:
            raise ValueError(f"top_k must be at least 1, not {top_k}")
        super().__init__(2)
        self.top_k = top_k

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch: outputs `[N, C]` (logits or probabilities) and classes `[N]`."""
        if self.top_k == 1:
            correct = preds.argmax(1) == target
        else:
            best = preds.topk(min(self.top_k, preds.shape[1]), dim=1).indices
            correct = (best == target.unsqueeze(1)).any(1)
        self.sums[0] += correct.sum()
        self.sums[1] += target.shape[0]

    def value(self, sums: Tensor) -> Tensor:
        """Correct ones by all."""
        return sums[0] / sums[1]


class BitsPerByte(SumMetric):
    """The mean negative log-likelihood of the next token in bits: what a byte of the text would be compressed to.

    8 is knowing nothing of bytes. The same quantity as the loss of a language model, in the unit that text models of
    different vocabularies are compared in; with tokens other than bytes it is bits per token.
    """

    higher_is_better = False

    def __init__(self) -> None:
        super().__init__(2)

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch: logits `[N, T, V]` and tokens `[N, T]`, those of -100 left out."""
        flat = target.flatten()
        nats = functional.cross_entropy(preds.flatten(0, 1).float(), flat, ignore_index=IGNORED, reduction="sum")
        self.sums[0] += nats / math.log(2)
        self.sums[1] += (flat != IGNORED).sum()

    def value(self, sums: Tensor) -> Tensor:
        """Bits by tokens."""
        return sums[0] / sums[1]


class TokenAccuracy(SumMetric):
    """The share of tokens that are the most likely ones by the model, 0..1."""

    higher_is_better = True

    def __init__(self) -> None:
        super().__init__(2)

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch: logits `[N, T, V]` and tokens `[N, T]`, those of -100 left out."""
        self.sums[0] += (preds.argmax(-1) == target).sum()
        self.sums[1] += (target != IGNORED).sum()

    def value(self, sums: Tensor) -> Tensor:
        """Correct ones by all."""
        return sums[0] / sums[1]


class _ErrorMetric(SumMetric):
    """A sum of errors and their number; shapes must agree, since broadcasting would make N x N errors of N."""

    higher_is_better = False
    _power: ClassVar[int]

    def __init__(self) -> None:
        super().__init__(2)

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch: outputs and targets of the same shape `[N, ...]`."""
        _check_shapes(preds, target)
        errors = (preds - target).to(self.sums.dtype).abs()
        self.sums[0] += errors.pow(self._power).sum()
        self.sums[1] += errors.numel()


class MeanAbsoluteError(_ErrorMetric):
    """The mean of |output - target| over all values, in the targets' unit."""

    _power = 1

    def value(self, sums: Tensor) -> Tensor:
        """The sum of the errors by their number."""
        return sums[0] / sums[1]


class RootMeanSquaredError(_ErrorMetric):
    """The root of the mean of (output - target)^2 over all values, in the targets' unit."""

    _power = 2

    def value(self, sums: Tensor) -> Tensor:
        """The root of the mean square."""
        return (sums[0] / sums[1]).sqrt()


class R2Score(SumMetric):
    """The coefficient of determination: 1 is perfect, 0 as good as the mean of the targets. No unit.

    One output; nan while the targets are all the same.
    """

    higher_is_better = True

    def __init__(self) -> None:
        super().__init__(4)

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch: outputs and targets of the same shape, `[N]` or `[N, 1]`."""
        _check_shapes(preds, target)
        if target.ndim > 1 and target[0].numel() != 1:
            raise ValueError(f"R2Score is of one output, but the targets are {list(target.shape)}")
        target = target.to(self.sums.dtype)
        squares = (preds.to(self.sums.dtype) - target).square().sum()
        count = target.new_full((), target.numel())
        self.sums += torch.stack([squares, target.square().sum(), target.sum(), count])

    def value(self, sums: Tensor) -> Tensor:
        """1 - residual sum of squares / total sum of squares."""
        residual, squares, total, count = sums.unbind()
        around_mean = squares - total.square() / count
        return torch.where(around_mean > 0, 1 - residual / around_mean, torch.nan)


def _check_shapes(preds: Tensor, target: Tensor) -> None:
    if preds.shape != target.shape:
        raise ValueError(f"outputs {list(preds.shape)} and targets {list(target.shape)} differ in shape")
