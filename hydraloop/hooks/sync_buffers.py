"""SyncBuffersHook: averages the model's buffers over all ranks, which compute them from their own batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.distributed.fsdp import local
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of torch's batch and instance normalisation; layers of other packages use the same names."""


class SyncBuffersHook(Hook):
    """Averages buffers of the model over the ranks, above all the running statistics of normalisation layers.

    Each rank's buffers come from its own batches. Without this hook, evaluation and checkpoints use those of rank 0.

    `hooks=sync_buffers` averages all buffers at the end of each train epoch, so that the checkpoint, the validation and
    the next epoch use the statistics of all data. `hooks=sync_norm` (`norm_only`) averages only the statistics of
    normalisation layers, before each evaluation. A checkpoint that is written before its epoch's validation then has
    rank 0's statistics, and those of the other ranks for a run that is resumed from it. Both average before an
    evaluation if iterations have passed since the last average. The buffers stay averaged on every rank when training
    continues.

    As in MMDetection, a variance is the mean of the ranks' variances. Means of integers (`num_batches_tracked`) are
    rounded, where MMEngine truncates them; boolean buffers do not change. If `ema` averages buffers (`update_buffers`),
    its averages are also averaged over the ranks, because they are evaluated, saved and published. With one process
    there is nothing to do. `distributed.sync_batchnorm` is different: it normalises the batches of all ranks together.

    Priority NORMAL, MMEngine's: before `checkpoint`, which saves the buffers. Cost: one all-reduce of all buffers, no
    host sync. No state. Options: `SyncBuffersHookConf`. From MMEngine's SyncBuffersHook and MMDetection's SyncNormHook.
    """

    collective = True

    def __init__(self, *, norm_only: bool = False) -> None:
        self._norm_only = norm_only
        self._averaged_at = 0  # iteration
        self.idle_points = ("after_train_epoch",) if norm_only else ()

    def after_train_epoch(self, engine: Engine) -> None:
        self._average(engine)

    def before_val(self, engine: Engine) -> None:
        self._average(engine)

    def before_test(self, engine: Engine) -> None:
        """Average, unless a validation has done it; the weights of a checkpoint file do not change."""
        self._average(engine)

    def _average(self, engine: Engine) -> None:
        if engine.progress.iteration != self._averaged_at:
            self._averaged_at = engine.progress.iteration
            buffers = _statistics(engine.model) if self._norm_only else engine.model.buffers()
            average_over_ranks(_with_averages(buffers, engine.hooks), engine.distributed)


def _statistics(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        own = dict(module.named_buffers(recurse=False))
        if "running_mean" in own:
            yield from (own[name] for name in STATISTICS if name in own)


def _with_averages(tensors: Iterable[Tensor], hooks: Mapping[str, Hook]) -> Iterator[Tensor]:
    """Yield each of the model's tensors, followed by its averages in hooks with `average_of` (as `ema` has): evaluation
    may use those.

    Means over updates and over ranks commute, so the order of the hooks does not matter.
    """
    averages_of = [hook.average_of for hook in hooks.values() if hasattr(hook, "average_of")]
    for tensor in tensors:
        yield tensor
        yield from (average for average_of in averages_of if (average := average_of(tensor)) is not None)


@torch.no_grad()
def average_over_ranks(tensors: Iterable[Tensor], ranks: Distributed) -> None:
    """Replace each tensor by its mean over all ranks; called on every rank with the same tensors. No host sync.

    One all-reduce per device, in float64: values that are equal on all ranks stay identical (in types shorter than
    float64), and means of integers are exact, then rounded. Boolean tensors do not change. With one rank, this does
    nothing.
    """
    if ranks.world_size == 1:
        return
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.dtype != torch.bool and tensor.numel():
            part = local(tensor)
            by_device.setdefault(part.device, []).append(torch.view_as_real(part) if part.is_complex() else part)
    for parts in by_device.values():
        means = ranks.sum(torch.cat([part.flatten().double() for part in parts])) / ranks.world_size
        for part, mean in zip(parts, torch.split(means, [part.numel() for part in parts]), strict=True):
            part.copy_((mean if part.is_floating_point() else mean.round()).view_as(part))
