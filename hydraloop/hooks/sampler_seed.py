"""DistSamplerSeedHook: a different order of the data in each epoch."""

from __future__ import annotations

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import epoch_setters


class DistSamplerSeedHook(Hook):
    """Tells the train loader's sampler which epoch begins, so that the order is a function of (seed, epoch).

    All ranks then use the same order, and a resumed run continues with it. `set_epoch` is called if the loader, its
    `sampler`, its `batch_sampler` or the sampler of that has it. A sampler without it (torch's for a single process)
    uses the global generator and is not changed. With
    `default_hooks.sampler_seed=null`, all epochs have the same order and the same augmentation.

    Priority NORMAL, MMEngine's. No host sync, nothing in an iteration. No state: the epoch is part of the run's
    progress. No options, as in MMEngine.
    """

    def at_position(self, engine: Engine) -> None:
        """Set the epoch, counted from 0."""
        for set_epoch in epoch_setters(engine.loaders.train):
            set_epoch(engine.progress.epoch)

    def before_train_epoch(self, engine: Engine) -> None:
        """Set the next epoch."""
        self.at_position(engine)
