"""The schedulers that torch does not have: a warm-up and a cosine in one."""

from __future__ import annotations

import math
from typing import ClassVar

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class _ByFactor(LRScheduler):
    """The lr of each group times a factor of the step, in recursive form as most of torch's: several multiply."""

    lengths: ClassVar[tuple[str, ...]]
    """Which arguments count scheduler steps; `convert_to_iter_based` multiplies them."""

    def factor(self, n: int) -> float:
        """Of the base lr in step n, which counts from 0."""
        raise NotImplementedError  # each of the two below has its own

    def get_lr(self) -> list[float | Tensor]:
        """The lr of `last_epoch`, from the one before."""
        if self.last_epoch == 0:
            scale = self.factor(0)
        else:
            before = self.factor(self.last_epoch - 1)
            scale = self.factor(self.last_epoch) / before if before else 1.0  # from 0 it never rises
        return [group["lr"] * scale for group in self.optimizer.param_groups]

    def _get_closed_form_lr(self) -> list[float | Tensor]:
        factor = self.factor(self.last_epoch)
        return [base * factor for base in self.base_lrs]


class WarmupCosineLR(_ByFactor):
    """A straight line up to the learning rate, then half a cosine down.

    The same values as `LinearLR` to `warmup_iters` and `CosineAnnealingLR` from there, in one schedule.

    Args:
        optimizer: whose lr it changes, each group from its own.
        total_iters: the whole length in scheduler steps, 1 or more; the lowest value comes with that step, and stays.
        warmup_iters: of these, those of the warm-up, 0 or more; None: a twentieth.
        start_factor: share of the lr in the first step, above 0, up to 1.
        min_lr_ratio: share of the lr at the end, 0..1.
        last_epoch: torch's; -1: from the start.
    """

    lengths = ("total_iters", "warmup_iters")

    def __init__(
        self,
        optimizer: Optimizer,
        total_iters: int,
        warmup_iters: int | None = None,
        start_factor: float = 0.01,
        min_lr_ratio: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        self.total_iters = total_iters
        self.warmup_iters = warmup_iters
        self.start_factor = start_factor
        self.min_lr_ratio = min_lr_ratio
        super().__init__(optimizer, last_epoch)

    def factor(self, n: int) -> float:
        """Of the base lr in step n, which counts from 0."""
        warm_up = self.total_iters // 20 if self.warmup_iters is None else self.warmup_iters
        if n < warm_up:
            return self.start_factor + (1 - self.start_factor) * n / warm_up
        if n >= self.total_iters:
            return self.min_lr_ratio
        return _cosine((n - warm_up) / (self.total_iters - warm_up), self.min_lr_ratio)


class YOLOXLR(_ByFactor):
    """YOLOX's: a warm-up that rises with the square of the step, a cosine, and the lowest value for the last epochs.

    The values of MMDetection's `YOLOXLrUpdaterHook`, step by step. The last part is the one that trains without strong
    augmentation. Its names are MMDetection's too; each length counts scheduler steps, which are epochs with
    `by_epoch` (`convert_to_iter_based` makes them optimizer steps).

    Args:
        optimizer: whose lr it changes, each group from its own.
        total_iters: the whole length in scheduler steps, 1 or more.
        warmup_iters: of these, those of the warm-up, 0 or more; None: a sixtieth (YOLOX: 5 of 300 epochs).
        num_last_epochs: of these, those at the end with the lowest value, 0 or more; None: a twentieth (YOLOX: 15 of
            300 epochs).
        warmup_ratio: share of the lr with which the warm-up ends, above 0, up to 1.
        min_lr_ratio: share of the lr at the end, 0..1.
        last_epoch: torch's; -1: from the start.
    """

    lengths = ("total_iters", "warmup_iters", "num_last_epochs")

    def __init__(
        self,
        optimizer: Optimizer,
        total_iters: int,
        warmup_iters: int | None = None,
        num_last_epochs: int | None = None,
        warmup_ratio: float = 1.0,
        min_lr_ratio: float = 0.05,
        last_epoch: int = -1,
    ) -> None:
        self.total_iters = total_iters
        self.warmup_iters = warmup_iters
        self.num_last_epochs = num_last_epochs
        self.warmup_ratio = warmup_ratio
        self.min_lr_ratio = min_lr_ratio
        super().__init__(optimizer, last_epoch)

    def factor(self, n: int) -> float:
        """Of the base lr in step n, which counts from 0."""
        warm_up = self.total_iters // 60 if self.warmup_iters is None else self.warmup_iters
        if n < warm_up:
            return self.warmup_ratio * ((n + 1) / warm_up) ** 2
        last = self.total_iters // 20 if self.num_last_epochs is None else self.num_last_epochs
        if n + 1 >= self.total_iters - last:
            return self.min_lr_ratio
        return _cosine((n + 1 - warm_up) / (self.total_iters - warm_up - last), self.min_lr_ratio)


def _cosine(share: float, lowest: float) -> float:
    """Half a cosine from 1 at share 0 to `lowest` at share 1."""
    return lowest + (1 - lowest) * (1 + math.cos(math.pi * share)) / 2
