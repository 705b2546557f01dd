"""SyncBuffersHook: averages the model's buffers over all ranks at the end of each epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hydraloop.engine.hook import Hook, Priority
from hydraloop.hooks.shared.over_ranks import average_over_ranks, with_averages

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine


class SyncBuffersHook(Hook):
    """Averages all buffers of the model over the ranks, above all the running statistics of normalisation layers.

    Each rank's buffers come from its own batches. Without this hook or `sync_norm`, evaluation and checkpoints use
    those of rank 0. The hook averages at the end of each train epoch, so that the checkpoint, the validation and the
    next epoch use the statistics of all data. A validation inside an epoch averages before it. Means of integers
    (`num_batches_tracked`) are rounded, where MMEngine truncates them; boolean buffers are unchanged. If `ema` averages
    buffers (`update_buffers`), its averages are averaged over the ranks too, because they are evaluated and published.
    With one process there is nothing to do.

    Mount points: after_train_epoch, before_val. Priority NORMAL, MMEngine's: before `checkpoint`, which saves the
    buffers. `ema` puts its buffers into the model later, in before_val_epoch, where MMEngine's hook runs. Cost: one
    all-reduce of all buffers, no host sync. No state, no options.
    """

    priority = Priority.NORMAL
    collective = True

    def __init__(self) -> None:
        self._averaged_at = 0
        """The iteration."""

    def after_train_epoch(self, engine: Engine) -> None:
        """Average."""
        self._average(engine)

    def before_val(self, engine: Engine) -> None:
        """Average if iterations were trained since the last time; the buffers of a loaded checkpoint are equal on all
        ranks."""
        if engine.progress.iteration > max(self._averaged_at, engine.began_at):
            self._average(engine)

    def _average(self, engine: Engine) -> None:
        self._averaged_at = engine.progress.iteration
        if engine.distributed.world_size > 1:
            average_over_ranks(with_averages(engine.model.buffers(), engine.hooks), engine.distributed)
