"""ModeSwitchHook: the last epochs without strong augmentations, and with an extra loss."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from hydraloop.engine.hook import Hook, Priority
from hydraloop.engine.inputs import end_workers
from hydraloop.errors import UserError
from hydraloop.hooks.shared.data_sets import data_sets_with

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine

log = logging.getLogger(__name__)


class ModeSwitchHook(Hook):
    """For the last `num_last_epochs`, the data set's strong augmentations off and the task's extra loss on.

    Strong augmentations (mosaic, mixup, large distortions) make images that no test image looks like; the last epochs
    without them bring the model back to real ones. It calls

    - `set_strong_augmentation(on: bool)` of the train data set, and of those it wraps (`dataset`, `datasets`);
    - `set_extra_loss(on: bool)` of the task, or else of the model;

    where they are there: at the start of training and at the switch, both with their value for the epoch that begins.
    A data set changes an attribute of its own, and that is all: loader workers start with a copy of it in each epoch,
    and persistent ones are started anew at the switch, once.

    Mount points: before_train (looks for the two methods), before_train_epoch. Priority NORMAL, MMDetection's: what it
    changes, no other hook reads. No host sync, nothing in an iteration; a start of persistent workers once a run. No
    state: the epoch says which mode it is, so a run resumed in the last epochs has their mode. Source: YOLOX (Z. Ge
    et al., 2021), MMDetection's YOLOXModeSwitchHook; that one switches an epoch earlier than its option says.

    Args:
        num_last_epochs: how many epochs, at least 1; a shorter run is in the last ones from its start. With
            `engine.max_iters` the last epoch may be a part of one, and counts.

    Raises:
        UserError: the number is below 1; before the first iteration: neither method is there.
    """

    priority = Priority.NORMAL

    def __init__(self, *, num_last_epochs: int = 15) -> None:
        if num_last_epochs < 1:
            raise UserError(
                f"{num_last_epochs} is below 1",
                key="num_last_epochs",
                remedy="Use 1 or more; without a switch, leave the hook out.",
            )
        self.num_last_epochs = num_last_epochs
        self._data_sets: list[Any] = []
        self._with_loss: Any = None
        self._last: bool | None = None

    def before_train(self, engine: Engine) -> None:
        """Find what can be switched.

        Raises:
            UserError: nothing can.
        """
        self._data_sets = data_sets_with("set_strong_augmentation", engine.loaders.train)
        owners = (owner for owner in (engine.task, engine.model) if hasattr(owner, "set_extra_loss"))
        self._with_loss = next(owners, None)
        if not self._data_sets and self._with_loss is None:
            raise UserError(
                "there is nothing to switch: the train data set has no set_strong_augmentation(on), and neither "
                f"{type(engine.task).__name__} nor {type(engine.model).__name__} has set_extra_loss(on)",
                key=self.key,
                remedy="Give one of them the method (data=digits_augmented has it), or leave the hook out.",
            )
        first = engine.max_epochs - self.num_last_epochs + 1
        when = f"from epoch {first} on" if first > 1 else f"from the start, as the run has {engine.max_epochs} epochs"
        log.info("%s: switches %s; missing: %s", self.key, when, self._missing() or "nothing")

    def before_train_epoch(self, engine: Engine) -> None:
        """Switch, if this epoch has another mode than the one before it."""
        last = engine.max_epochs - engine.progress.epoch <= self.num_last_epochs
        if last == self._last:
            return
        self._last = last
        for data in self._data_sets:
            data.set_strong_augmentation(not last)
        if self._data_sets:
            end_workers(engine.loaders.train)
        if self._with_loss is not None:
            self._with_loss.set_extra_loss(last)
        augmentation, loss = ("off", "on") if last else ("on", "off")
        names = [f"strong augmentation {augmentation} ({type(data).__name__})" for data in self._data_sets]
        if self._with_loss is not None:
            names.append(f"extra loss {loss} ({type(self._with_loss).__name__})")
        log.info("epoch %d: %s", engine.progress.epoch + 1, ", ".join(names))

    def _missing(self) -> str:
        missing = [] if self._data_sets else ["a data set with set_strong_augmentation(on)"]
        return ", ".join(missing if self._with_loss is not None else [*missing, "a task with set_extra_loss(on)"])
