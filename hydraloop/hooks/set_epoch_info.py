"""SetEpochInfoHook: tells the task, the model and the train data set which epoch begins."""

from __future__ import annotations

import logging
from typing import Any

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import keeps_workers
from hydraloop.hooks.shared.data_sets import data_sets_with

log = logging.getLogger(__name__)


class SetEpochInfoHook(Hook):
    """Calls `set_epoch(epoch)` of the task, the model and the train data set, and of data sets that it wraps, if they
    have it.

    The epoch is the one that begins, counted from 0 as in MMDetection; a run that resumes inside an epoch passes its
    number again. The model is the raw one, without wrappers of DDP or torch.compile. The sampler's `set_epoch` is
    called by `sampler_seed`. A stream is left out: its loader calls `set_epoch` with the number of the pass. Loader
    workers start with a copy of the data set in each epoch. Persistent workers keep their first copy; the hook warns
    about this once.

    Priority NORMAL, MMDetection's. No host sync, nothing in an iteration. No state: the epoch is part of the run's
    progress. No options, as in MMDetection, where the hook is for the model only.
    """

    def __init__(self) -> None:
        self._told: list[Any] = []

    def before_train(self, engine: Engine) -> None:
        """Find the methods; warn if there are no methods, or if persistent workers will not get the epoch."""
        modules = [module for module in (engine.task, engine.model) if hasattr(module, "set_epoch")]
        loader = engine.loaders.train
        data_sets = [] if getattr(loader, "calls_set_epoch", False) else data_sets_with("set_epoch", loader)
        self._told = [*modules, *data_sets]
        if not self._told:
            names = f"{type(engine.task).__name__}, {type(engine.model).__name__} or the train data set"
            log.warning("%s does nothing: there is no set_epoch(epoch) in %s", self.key, names)
        if data_sets and keeps_workers(loader):
            log.warning(
                "%s: set_epoch of %s reaches only this process: persistent workers have copies of the data set; "
                "set data.loader.persistent_workers=false, or write the epoch to a tensor in shared memory",
                self.key,
                ", ".join(type(data).__name__ for data in data_sets),
            )

    def before_train_epoch(self, engine: Engine) -> None:
        for one in self._told:
            one.set_epoch(engine.progress.epoch)
