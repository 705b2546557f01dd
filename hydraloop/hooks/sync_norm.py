"""SyncNormHook: averages the running statistics of normalisation layers over all ranks before each evaluation."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.hooks.shared.buffer_averages import average_over_ranks, with_averages

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of torch's batch and instance normalisation; layers of other packages use the same names."""


class SyncNormHook(Hook):
    """Averages the running statistics of normalisation layers over the ranks, before each validation and test.

    Each rank's statistics come from its own batches, and the engine evaluates with those of rank 0. They stay averaged
    on every rank when training continues. As in MMDetection, the variance is the mean of the ranks' variances. A
    checkpoint that is written before its epoch's validation contains rank 0's statistics; `sync_buffers` averages
    before that and makes this hook unnecessary. If `ema` averages the statistics (`update_buffers`), its averages are
    also averaged over the ranks, because they are evaluated, saved and published. With one process there is nothing to
    do. `distributed.sync_batchnorm` is different: it normalises the batches of all ranks together.

    Priority NORMAL, MMDetection's. Cost: one all-reduce per evaluation for all layers; no host sync. No state, no
    options. From MMDetection's SyncNormHook.
    """

    collective = True

    def before_val(self, engine: Engine) -> None:
        _average(engine)

    def before_test(self, engine: Engine) -> None:
        """Average; the weights of a checkpoint file are equal on all ranks and do not change."""
        _average(engine)


def _average(engine: Engine) -> None:
    average_over_ranks(with_averages(_statistics(engine.model), engine.hooks), engine.distributed)


def _statistics(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        own = dict(module.named_buffers(recurse=False))
        if "running_mean" in own:
            yield from (own[name] for name in STATISTICS if name in own)
