"""Hook: the mount points of a run, and the priorities that order hooks at each of them.

One run, with every mount point in its place::

    before_run
    │   after_load_checkpoint                    with resume= or load_from=
    │   at_position                              at the start, after a resume
    │   before_train
    │   │   before_train_epoch                   ┐ before_epoch(mode="train")
    │   │   │   before_train_iter                │ before_iter(mode="train")
    │   │   │       forward, loss, backward      │
    │   │   │   after_backward                   │ every iteration
    │   │   │   before_optimizer_step            │ once in `accumulate` iterations, gradients unscaled
    │   │   │       optimizer step               │
    │   │   │   after_train_iter                 │ after_iter(mode="train"); counters have moved
    │   │   │   on_log                           │ a record was made (by the logger or another hook)
    │   │   after_train_epoch                    ┘ after_epoch(mode="train")
    │   │   before_save_checkpoint               a checkpoint is about to be written
    │   │   before_val
    │   │   │   before_val_epoch                 ┐ before_epoch(mode="val")
    │   │   │   │   before_val_iter              │ before_iter(mode="val")
    │   │   │   │       evaluate                 │
    │   │   │   │   after_val_iter               │ after_iter(mode="val")
    │   │   │   after_val_epoch                  ┘ after_epoch(mode="val"); the metrics are there
    │   │   after_val
    │   on_exception                             only when something was raised
    │   after_train                              always, once before_train was reached
    │   before_test … after_test                 like val, once, after training
    after_run                                    always

A task with steps has after_backward and before_optimizer_step once for each step of an iteration
(`engine.stepper.task_step`).

At every mount point, hooks are called by priority (0 first), then default hooks before custom ones, then in the order
of their selection. This file imports no torch: the dry run reads priorities and mount points from it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hydraloop.engine.interval import Every
from hydraloop.errors import UserError, suggestion

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine

Mode = Literal["train", "val", "test"]
OnError = Literal["raise", "warn", "disable"]
ON_ERROR: tuple[OnError, ...] = ("raise", "warn", "disable")
Call = Callable[..., None]


GENERAL_POINTS: dict[str, tuple[tuple[str, Mode], ...]] = {
    general: tuple((general.replace("_", f"_{mode}_"), mode) for mode in ("train", "val", "test"))
    for general in ("before_epoch", "after_epoch", "before_iter", "after_iter")
}
"""The four general points, and the mount points (with their mode) at which each is called."""


class Priority(IntEnum):
    """When a hook is called at a mount point: 0 first, 100 last. MMEngine's scale."""

    HIGHEST = 0
    VERY_HIGH = 10
    HIGH = 30
    ABOVE_NORMAL = 40
    NORMAL = 50
    BELOW_NORMAL = 60
    LOW = 70
    VERY_LOW = 90
    LOWEST = 100
    # iMIX's names for two of them.
    HIGHER = VERY_HIGH
    LOWER = VERY_LOW

    @classmethod
    def of(cls, value: int | str, key: str | None = None) -> int:
        """Return the number of a priority given as a number (0..100) or a name (any case).

        Raises:
            UserError: the number is out of range or the name unknown; names `key`.
        """
        if isinstance(value, str):
            if value.strip().lstrip("-").isdigit():
                return cls.of(int(value), key)
            try:
                return int(cls.__members__[value.strip().upper()])
            except KeyError:
                raise UserError(
                    f"there is no priority {value!r}",
                    key=key,
                    remedy=suggestion(value, cls.__members__) + " A number from 0 (first) to 100 (last) works too.",
                ) from None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 100:
            remedy = f"Use a number from 0 (first) to 100 (last), or a name: {', '.join(cls.__members__)}."
            raise UserError(f"priority {value!r} is out of range", key=key, remedy=remedy)
        return int(value)


class Hook:
    """Base class of all hooks: override the mount points that you need.

    A hook runs on every rank. It requests (`engine.request_stop`, `engine.request_checkpoint`), and the engine acts on
    all ranks together. A hook with a state to resume overrides `state_dict` and `load_state_dict`.

    A method with a misspelled mount point name (`after_trian_iter`), or one that does not take the arguments, is an
    error when the class is created.
    """

    priority: ClassVar[int | str] = Priority.NORMAL
    """When the hook is called at each mount point; `hooks.<name>.priority` overrides it."""
    runs_after: ClassVar[tuple[str, ...]] = ()
    """Names of hooks that must run before this one if they are selected."""
    on_error: ClassVar[OnError] = "raise"
    """What an exception in the hook does: end the run, warn, or warn and switch the hook off."""
    rank_zero_only: ClassVar[bool] = False
    """True: called on rank 0 only."""
    collective: ClassVar[bool] = False
    """True: it calls collectives, which need all ranks, so `on_error` must be `raise`."""
    changes_evaluation: ClassVar[bool] = False
    """True: metrics of a test depend on it, so that `hydraloop.load` keeps it. Hooks without it are left out there."""

    idle_points: Collection[str] = ()
    """Mount points at which this instance is not called, because its options give it nothing to do there. Set in its
    constructor."""
    name: str = ""
    """Its key in the config, set by the engine; identifies the hook in overrides, state dict, logs and errors."""
    key: str = ""
    """Its full key in the config (`default_hooks.checkpoint`), for error messages; set by the builder."""

    def __init__(self) -> None:
        """Take no options. Without it, `inspect.signature` of a hook parses a text: 3 ms in a job of a sweep."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _check_mount_points(cls)

    # Mount points, in the order of a run. ----------------------------------------------------------------------------

    def before_run(self, engine: Engine) -> None:
        """Called first, when everything is built and nothing is loaded. Check options against the run here."""

    def after_load_checkpoint(self, engine: Engine, checkpoint: dict[str, Any]) -> None:
        """Called after a checkpoint was loaded, model and hook states included; also when the run goes back to one."""

    def at_position(self, engine: Engine) -> None:
        """Called when `engine.progress` is set: at the start of training and after a resume. Set what
        follows from the position here, also if it was set before. Later points move it on. Random numbers drawn here do
        not change a resumed run."""

    def before_train(self, engine: Engine) -> None:
        """Called once before the first epoch, after loading."""

    def before_train_epoch(self, engine: Engine) -> None:
        """Before each epoch, and when a run resumes inside an epoch (`engine.progress.resumed_in_epoch`)."""

    def before_train_iter(self, engine: Engine, batch_idx: int, batch: Any) -> None:
        """Before the forward pass; `batch_idx` counts from 0 within the epoch; `batch` is on the device."""

    def after_backward(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """After each backward. In fp16 gradients are scaled, and within a window they are accumulated."""

    def before_optimizer_step(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """Once in each accumulation window, with gradients unscaled and weighted. Clip or inspect them here. They are
        those of `engine.stepper.optimizer`."""

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """After each iteration; `engine.stepper.stepped` is whether an optimizer stepped in it.

        `outputs["loss"]` is the detached loss, a scalar tensor on the device. With steps of the task, it is the sum of
        their losses, and the outputs of each step are named `<step>/<name>`.
        """

    def on_log(self, engine: Engine, record: Mapping[str, Any]) -> None:
        """Called on rank 0 with each record: plain numbers and strings."""

    def after_train_epoch(self, engine: Engine) -> None:
        """After each epoch; `engine.progress.epoch` includes it."""

    def before_save_checkpoint(self, engine: Engine, checkpoint: dict[str, Any]) -> None:
        """Called before a checkpoint is written. Add metadata to it here; state belongs in `state_dict`."""

    def before_val(self, engine: Engine) -> None:
        """Before a validation."""

    def before_val_epoch(self, engine: Engine) -> None:
        """Before the validation loop."""

    def before_val_iter(self, engine: Engine, batch_idx: int, batch: Any) -> None:
        """Before a validation batch."""

    def after_val_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """After a validation batch, with what the task's `evaluate` returned."""

    def after_val_epoch(self, engine: Engine, metrics: Mapping[str, float]) -> None:
        """After the validation loop, with its metrics over all ranks; the model has the training weights again."""

    def after_val(self, engine: Engine) -> None:
        """After a validation."""

    def on_exception(self, engine: Engine, error: BaseException) -> None:
        """Called after an error (also a KeyboardInterrupt); after_train and after_run still follow."""

    def after_train(self, engine: Engine) -> None:
        """Called once after the last epoch, always; `engine.error` is the error that ended training, or None."""

    def before_test(self, engine: Engine) -> None:
        """Before the test."""

    def before_test_epoch(self, engine: Engine) -> None:
        """Before the test loop."""

    def before_test_iter(self, engine: Engine, batch_idx: int, batch: Any) -> None:
        """Before a test batch."""

    def after_test_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """After a test batch, with what the task's `evaluate` returned."""

    def after_test_epoch(self, engine: Engine, metrics: Mapping[str, float]) -> None:
        """After the test loop, with its metrics over all ranks; the model has the training weights again."""

    def after_test(self, engine: Engine) -> None:
        """After the test."""

    def after_run(self, engine: Engine) -> None:
        """Called last, always; `engine.error` is the error that ended the run. Close files and trackers here."""

    # General points, called in training, validation and test. --------------------------------------------------------

    def before_epoch(self, engine: Engine, mode: Mode) -> None:
        """Before each train, val and test epoch. A class that also overrides the specific point gets both calls."""

    def after_epoch(self, engine: Engine, mode: Mode) -> None:
        """After each train, val and test epoch."""

    def before_iter(self, engine: Engine, batch_idx: int, batch: Any, mode: Mode) -> None:
        """Before each train, val and test iteration."""

    def after_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any], mode: Mode) -> None:
        """After each train, val and test iteration."""

    # State. --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed run: tensors, numbers, strings, and lists and dicts of these."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state that `state_dict` has returned."""

    # For the engine. -------------------------------------------------------------------------------------------------

    @classmethod
    def overrides(cls, method: str) -> bool:
        """Return whether the class overrides a method of `Hook`."""
        return getattr(cls, method) is not getattr(Hook, method)

    def attach(self, name: str, key: str) -> None:
        """Set the name, and the key unless the hook has one."""
        self.name, self.key = name, self.key or key

    # MMEngine's helpers; `n` and `begin` are those of `interval.Every`. ----------------------------------------------

    def every_n_train_iters(self, engine: Engine, n: int, begin: int = 0) -> bool:
        """Return whether the number of completed iterations is a multiple of n; `begin` as in `Every`.

        The current iteration counts from after_train_iter on.
        """
        return Every(n, begin).fires_at(engine.progress.iteration)

    def every_n_iters(self, engine: Engine, n: int, begin: int = 0) -> bool:
        """The same as `every_n_train_iters`, by MMCV's name."""
        return self.every_n_train_iters(engine, n, begin)

    def every_n_epochs(self, engine: Engine, n: int, begin: int = 0) -> bool:
        """Return whether the number of completed epochs is a multiple of n; `begin` as in `Every`."""
        return Every(n, begin).fires_at(engine.progress.epoch)

    def end_of_epoch(self, engine: Engine, batch_idx: int, mode: Mode = "train") -> bool:
        """Return whether the batch at `batch_idx` is the last of the epoch, in the loop of `mode`."""
        return batch_idx + 1 == (engine.progress.epoch_length if mode == "train" else engine.evaluator.length)

    def is_last_train_epoch(self, engine: Engine) -> bool:
        """Return whether this epoch is the last, at all mount points from its before_train_epoch on.

        False if training stops earlier than planned (`engine.requests.stopping`), which is not known in advance.
        """
        return engine.progress.epoch_begun == engine.max_epochs or engine.progress.iteration >= engine.max_iters

    def is_last_train_iter(self, engine: Engine) -> bool:
        """Return whether the iteration just completed is the last."""
        return engine.progress.iteration >= engine.max_iters


def check_hook(hook: object, key: str) -> None:
    """Refuse an object that is not a hook; `key` names its option."""
    if not isinstance(hook, Hook):
        raise UserError(f"{type(hook).__name__} is not a Hook", key=key, remedy="Inherit from hydraloop.Hook.")
    if hook.name and not hook.key:
        raise UserError(
            f"{type(hook).__name__} sets its attribute name, which is the name of the hook",
            key=key,
            remedy="Rename it: self.label = …",
        )


_PREFIXES = ("before_", "after_", "on_")
_METHODS = [name for name, value in vars(Hook).items() if inspect.isfunction(value)]
_POINT_NAMES = [name for name in _METHODS if name.startswith((*_PREFIXES, "at_"))]
MOUNT_POINTS = tuple(name for name in _POINT_NAMES if name not in GENERAL_POINTS)
"""The mount points in the order of a run. `Hook` says when each is called, and with what."""
_ALMOST_EQUAL = 0.9
"""Similarity from which a name is a misspelled mount point: `fater_train_iter`, `at_positon`, but not `at_point`."""


def _check_mount_points(cls: type[Hook]) -> None:
    """Refuse methods of `cls` that could not be called, and those with a misspelled name, which would never be."""
    for name, value in vars(cls).items():
        if name.startswith("_") or not inspect.isfunction(value):
            continue
        if name in _POINT_NAMES:
            arguments = inspect.signature(getattr(Hook, name)).parameters
            try:
                inspect.signature(value).bind(*arguments)
            except TypeError:
                raise UserError(
                    f"it does not take the arguments with which it is called: {', '.join([*arguments][1:])}",
                    key=f"{cls.__module__}.{cls.__qualname__}.{name}",
                    remedy=f"Write def {name}({', '.join(arguments)}):",
                ) from None
        elif name not in _METHODS and (
            name.startswith(_PREFIXES) or get_close_matches(name, _POINT_NAMES, cutoff=_ALMOST_EQUAL)
        ):
            raise UserError(
                "there is no such mount point",
                key=f"{cls.__module__}.{cls.__qualname__}.{name}",
                remedy=f"{suggestion(name, _POINT_NAMES)} Begin the names of your own helpers with an underscore.",
            )
