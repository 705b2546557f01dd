"""When an epoch begins: samplers, data sets, task and model get its number, or the mode of the last epochs."""

from __future__ import annotations

import logging
from typing import Any

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import data_sets_with, end_workers, epoch_setters
from hydraloop.errors import UserError
from hydraloop.schemas.option_checks import check_at_least


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
        self._receivers: list[Any] = []
        self._epoch = 0

    def at_position(self, engine: Engine) -> None:
        """Find the methods, and pass the epoch that began last; warn if there are no methods."""
        loader = engine.loaders.train
        self._receivers = [module for module in (engine.task, engine.model) if hasattr(module, "set_epoch")]
        if not getattr(loader, "calls_set_epoch", False):
            self._receivers += data_sets_with("set_epoch", loader)
        if not self._receivers:
            names = f"{type(engine.task).__name__} or {type(engine.model).__name__}"
            log.warning("%s does nothing: there is no set_epoch(epoch) in %s", self.key, names)
        self._pass_epoch(max(engine.progress.epoch_begun - 1, 0))

    def before_train_epoch(self, engine: Engine) -> None:
        """Pass the next epoch."""
        if engine.progress.epoch != self._epoch:
            self._pass_epoch(engine.progress.epoch)

    def _pass_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        for receiver in self._receivers:
            receiver.set_epoch(epoch)


class ModeSwitchHook(Hook):
    """Switches off the data set's strong augmentations and switches on the task's extra loss for the last epochs.

    Strong augmentations (mosaic, mixup, large distortions) make images that do not occur in the test; the last epochs
    adapt the model to real ones. At the start of training and at the switch, the hook calls, if they exist:

    - `set_strong_augmentation(on: bool)` of the train data set and of those it wraps (`dataset`, `datasets`);
    - `set_extra_loss(on: bool)` of the task, or else of the model.

    In the data set, the method only needs to set an attribute: loader workers have copies of the data set, and are
    restarted once, at the switch.

    Priority NORMAL, MMDetection's. No host sync, nothing in an iteration. No state: the epoch determines the mode, so a
    resumed run has the right one. Options: `ModeSwitchHookConf`. From YOLOX (Z. Ge et al., 2021) and MMDetection's
    YOLOXModeSwitchHook, which switches one epoch earlier than its option says.

    Raises:
        UserError: before the first iteration, neither method exists.
    """

    def __init__(self, *, num_last_epochs: int = 15) -> None:
        check_at_least(1, num_last_epochs=num_last_epochs)
        self.num_last_epochs = num_last_epochs
        self._data_sets: list[Any] = []
        self._with_loss: list[Any] = []
        self._last: bool | None = None

    def at_position(self, engine: Engine) -> None:
        """Find what can be switched, and set the mode of the epoch that began last."""
        self._data_sets = data_sets_with("set_strong_augmentation", engine.loaders.train)
        self._with_loss = [one for one in (engine.task, engine.model) if hasattr(one, "set_extra_loss")][:1]
        if not self._data_sets and not self._with_loss:
            raise UserError(
                "there is nothing to switch: the train data set has no set_strong_augmentation(on), and neither "
                f"{type(engine.task).__name__} nor {type(engine.model).__name__} has set_extra_loss(on)",
                key=self.key,
                remedy="Add one of the methods, or leave the hook out.",
            )
        first = engine.max_epochs - self.num_last_epochs + 1
        when = f"from epoch {first} on" if first > 1 else f"from the start, as the run has {engine.max_epochs} epochs"
        log.info("%s: switches %s", self.key, when)
        self._switch(engine, max(engine.progress.epoch_begun - 1, 0))

    def before_train_epoch(self, engine: Engine) -> None:
        """Set the mode of the next epoch."""
        self._switch(engine, engine.progress.epoch)

    def _switch(self, engine: Engine, epoch: int) -> None:
        """Set the mode of an epoch (from 0), if it is not set yet."""
        last = engine.max_epochs - epoch <= self.num_last_epochs
        if last == self._last:
            return
        self._last = last
        for data in self._data_sets:
            data.set_strong_augmentation(not last)
        for one in self._with_loss:
            one.set_extra_loss(last)
        if self._data_sets:
            end_workers(engine.loaders.train)
        augmentation, loss = ("off", "on") if last else ("on", "off")
        switched = [f"strong augmentation {augmentation} ({type(data).__name__})" for data in self._data_sets]
        switched += [f"extra loss {loss} ({type(one).__name__})" for one in self._with_loss]
        log.info("epoch %d: %s", epoch + 1, ", ".join(switched))
