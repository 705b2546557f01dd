"""Tell samplers, data sets and models the number of the epoch."""

from __future__ import annotations

import logging
from typing import Any

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import data_sets_with, epoch_setters


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


log = logging.getLogger(__name__)


class SetEpochInfoHook(Hook):
    """Calls `set_epoch(epoch)` of the task and the model, if they have it.

    The epoch is the one that begins, counted from 0 as in MMDetection. A resumed run first passes the number of the
    epoch that began last. The model is the raw one, without wrappers of DDP or torch.compile. The method of the train
    data set is called by its loader, in the process that loads, also without this hook; the sampler's by
    `sampler_seed`. Only for a ready loader (a DataLoader of your own), this hook calls the method of the data set, in
    this process.

    Priority NORMAL, MMDetection's. No host sync, nothing in an iteration. No state: the epoch is part of the run's
    progress. No options, as in MMDetection, where the hook is for the model only.
    """

    def __init__(self) -> None:
        self._told: list[Any] = []
        self._epoch = 0

    def at_position(self, engine: Engine) -> None:
        """Find the methods, and pass the epoch that began last; warn if there are no methods."""
        loader = engine.loaders.train
        self._told = [module for module in (engine.task, engine.model) if hasattr(module, "set_epoch")]
        if not getattr(loader, "calls_set_epoch", False):
            self._told += data_sets_with("set_epoch", loader)
        if not self._told:
            names = f"{type(engine.task).__name__} or {type(engine.model).__name__}"
            log.warning("%s does nothing: there is no set_epoch(epoch) in %s", self.key, names)
        self._tell(max(engine.progress.epoch_begun - 1, 0))

    def before_train_epoch(self, engine: Engine) -> None:
        """Pass the next epoch."""
        if engine.progress.epoch != self._epoch:
            self._tell(engine.progress.epoch)

    def _tell(self, epoch: int) -> None:
        self._epoch = epoch
        for one in self._told:
            one.set_epoch(epoch)
