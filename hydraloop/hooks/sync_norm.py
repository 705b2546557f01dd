"""SyncNormHook: the running statistics of normalisation layers, averaged over all ranks before each evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor, nn

from hydraloop.engine.hook import Hook, Priority
from hydraloop.hooks.shared.over_ranks import average_over_ranks, with_averages

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""What torch's batch and instance normalisation keep, by name; layers of other packages use the same names."""


class SyncNormHook(Hook):
    """Averages the running statistics of normalisation layers over the ranks, before each validation and test.

    Each rank's statistics come from its own batches, and the engine evaluates with rank 0's; with this hook rank 0's
    are those of all ranks. They stay averaged, on every rank, when training goes on. As in MMDetection, the variance is
    the mean of the ranks' variances. In a single process there is nothing to do. A checkpoint that is written before
    its epoch's validation has rank 0's own; with `sync_buffers`, which averages before that, this hook has nothing left
    to do. Where `ema` averages them too (`update_buffers`), its averages are averaged over the ranks likewise: they are
    what is evaluated, saved and published. `distributed.sync_batchnorm` is another thing: all ranks' batches are
    normalised together.

    Mount points: before_val, before_test: before `ema` puts other weights into the model (in before_val_epoch), and
    before the engine gives all ranks rank 0's buffers. Priority NORMAL, MMDetection's. Cost: one all-reduce an
    evaluation, for all layers together; no host sync. No state, no options. From MMDetection's SyncNormHook.
    """

    priority = Priority.NORMAL
    collective = True

    def before_val(self, engine: Engine) -> None:
        """Average."""
        _average(engine)

    def before_test(self, engine: Engine) -> None:
        """Average; the weights of a checkpoint file are the same on all ranks, and stay as they are."""
        _average(engine)


def _average(engine: Engine) -> None:
    if engine.distributed.world_size > 1:
        average_over_ranks(with_averages(_statistics(engine.model), engine.hooks), engine.distributed)


def _statistics(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        own = dict(module.named_buffers(recurse=False))
        if "running_mean" in own:
            yield from (own[name] for name in STATISTICS if name in own)
