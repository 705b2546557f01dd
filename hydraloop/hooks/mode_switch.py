"""ModeSwitchHook: trains the last epochs without strong augmentations and with an extra loss."""

from __future__ import annotations

import logging
from typing import Any

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import data_sets_with, end_workers
from hydraloop.errors import UserError
from hydraloop.schemas.option_checks import check_at_least

log = logging.getLogger(__name__)


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
        missing = [] if self._data_sets else ["a data set with set_strong_augmentation(on)"]
        missing += [] if self._with_loss else ["a task with set_extra_loss(on)"]
        if len(missing) == 2:
            raise UserError(
                "there is nothing to switch: the train data set has no set_strong_augmentation(on), and neither "
                f"{type(engine.task).__name__} nor {type(engine.model).__name__} has set_extra_loss(on)",
                key=self.key,
                remedy="Add one of the methods, or leave the hook out.",
            )
        first = engine.max_epochs - self.num_last_epochs + 1
        when = f"from epoch {first} on" if first > 1 else f"from the start, as the run has {engine.max_epochs} epochs"
        log.info("%s: switches %s; missing: %s", self.key, when, ", ".join(missing) or "nothing")
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
