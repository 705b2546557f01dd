"""SyncBuffersHook: averages the model's buffers over all ranks at the end of each epoch."""

from __future__ import annotations

from typing import Any

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.hooks.shared.buffer_averages import average_over_ranks, with_averages


class SyncBuffersHook(Hook):
    """Averages all buffers of the model over the ranks, above all the running statistics of normalisation layers.

    Each rank's buffers come from its own batches. Without this hook or `sync_norm`, evaluation and checkpoints use
    those of rank 0. The hook averages at the end of each train epoch, so that the checkpoint, the validation and the
    next epoch use the statistics of all data, and before a validation inside an epoch. Means of integers
    (`num_batches_tracked`) are rounded, where MMEngine truncates them; boolean buffers do not change. If `ema` averages
    buffers (`update_buffers`), its averages are also averaged over the ranks, because they are evaluated and published.
    With one process there is nothing to do.

    Priority NORMAL, MMEngine's: before `checkpoint`, which saves the buffers. Cost: one all-reduce of all buffers, no
    host sync. No state, no options.
    """

    collective = True

    def __init__(self) -> None:
        self._averaged_at = 0  # iteration

    def after_load_checkpoint(self, engine: Engine, checkpoint: dict[str, Any]) -> None:
        """Note that the buffers are equal on all ranks, as the checkpoint has one copy."""
        self._averaged_at = engine.progress.iteration

    def after_train_epoch(self, engine: Engine) -> None:
        self._average(engine)

    def before_val(self, engine: Engine) -> None:
        if engine.progress.iteration > self._averaged_at:
            self._average(engine)

    def _average(self, engine: Engine) -> None:
        self._averaged_at = engine.progress.iteration
        average_over_ranks(with_averages(engine.model.buffers(), engine.hooks), engine.distributed)
