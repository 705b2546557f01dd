"""SyncBuffersHook: the model's buffers, averaged over all ranks at the end of each epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hydraloop.engine.hook import Hook, Priority
from hydraloop.hooks.shared.over_ranks import average_over_ranks, with_averages

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine


class SyncBuffersHook(Hook):
    """Averages all buffers of the model (running statistics of normalisation layers, above all) over the ranks.

    Each rank's buffers come from its own batches. Without this hook, or `sync_norm`, evaluation and checkpoints have
    rank 0's. Averaged at the end of each train epoch, they are those of all data in the epoch's checkpoint, in its
    validation, and on every rank for the next epoch. A validation inside an epoch (by iteration) averages before it.
    Of integers (`num_batches_tracked`) the mean is rounded, where mmengine's division cuts it off; boolean buffers stay
    as they are. Where `ema` averages buffers too (`update_buffers`), its averages are averaged over the ranks likewise:
    they are what is evaluated and published. In a single process there is nothing to do.

    Mount points: after_train_epoch, before_val. Priority NORMAL, MMEngine's: before `checkpoint`, which saves them; and
    before `ema` puts other buffers into the model for the validation, in before_val_epoch, where mmengine's hook comes.
    Cost: one all-reduce of all buffers, no host sync. No state, no options.
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
        """Average, if there were iterations since then; the buffers of a loaded checkpoint are the same everywhere."""
        if engine.progress.iteration > max(self._averaged_at, engine.began_at):
            self._average(engine)

    def _average(self, engine: Engine) -> None:
        self._averaged_at = engine.progress.iteration
        if engine.distributed.world_size > 1:
            average_over_ranks(with_averages(engine.model.buffers(), engine.hooks), engine.distributed)
