"""Hook: what can be called, when, in which order.

One run, with every mount point in its place::

    before_run
    │   after_load_checkpoint                    only with resume= or load_from=
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

At each mount point hooks are called by priority (0 first), default hooks before custom ones on a tie, then in the
order of their selection; the same order everywhere, closing points included.

This file needs no torch: the dry run reads the priorities and mount points from here.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hydraloop.engine.interval import Every
from hydraloop.errors import UserError, close_names, suggestion

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine

Mode = Literal["train", "val", "test"]
OnError = Literal["raise", "warn", "disable"]
ON_ERROR: tuple[OnError, ...] = ("raise", "warn", "disable")


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
        """The number of a priority given as a number (0..100) or a name (any case).

        Raises:
            UserError: the number is out of range or the name unknown; `key` is named in it.
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
                    remedy=f"{suggestion(value, cls.__members__)} A number from 0 (first) to 100 (last) works too.",
                ) from None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 100:
            raise UserError(
                f"priority {value!r} is out of range",
                key=key,
                remedy=f"Use a number from 0 (first) to 100 (last), or a name: {', '.join(cls.__members__)}.",
            )
        return int(value)


MOUNT_POINTS: tuple[str, ...] = (
    "before_run",
    "after_load_checkpoint",
    "before_train",
    "before_train_epoch",
    "before_train_iter",
    "after_backward",
    "before_optimizer_step",
    "after_train_iter",
    "on_log",
    "after_train_epoch",
    "before_save_checkpoint",
    "before_val",
    "before_val_epoch",
    "before_val_iter",
    "after_val_iter",
    "after_val_epoch",
    "after_val",
    "on_exception",
    "after_train",
    "before_test",
    "before_test_epoch",
    "before_test_iter",
    "after_test_iter",
    "after_test_epoch",
    "after_test",
    "after_run",
)
"""All 26, in the order of a run."""

GENERAL_POINTS: dict[str, tuple[tuple[str, Mode], ...]] = {
    general: tuple((f"{when}_{mode}_{what}", mode) for mode in ("train", "val", "test"))
    for general, when, what in (
        ("before_epoch", "before", "epoch"),
        ("after_epoch", "after", "epoch"),
        ("before_iter", "before", "iter"),
        ("after_iter", "after", "iter"),
    )
}
"""The four general points, and the mount points (with their mode) at which each is called."""


class Hook:
    """Base class of all hooks: override the mount points you need, leave the rest.

    A hook runs on every rank. It asks (`engine.request_stop`, `engine.request_checkpoint`); the engine decides, for
    all ranks together. A hook with something to resume has `state_dict` and `load_state_dict`.

    A method named like a mount point that is none (`after_trian_iter`) is an error when the class is created.
    """

    priority: ClassVar[int | str] = Priority.NORMAL
    """When it is called at each mount point; `hooks.<name>.priority` overrides it."""
    runs_after: ClassVar[tuple[str, ...]] = ()
    """Names of hooks that must come before this one where they are selected too."""
    on_error: ClassVar[OnError] = "raise"
    """What an exception in it does: end the run, warn and go on, or warn once and switch the hook off."""
    rank_zero_only: ClassVar[bool] = False
    """True: called on rank 0 only."""
    collective: ClassVar[bool] = False
    """True: it calls collectives. With several ranks all must call it, so its errors may only be raised then."""

    idle_points: Collection[str] = ()
    """Mount points at which this instance, as it is configured, has nothing to do: set in the constructor by a hook
    that would otherwise return at once in every iteration."""
    name: str = ""
    """Its key in the config, set by the engine: override path, state-dict key, name in logs and errors."""
    key: str = ""
    """Its full path in the config (`default_hooks.checkpoint`), set by the builder, for error messages."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _refuse_misspelt_mount_points(cls)

    # The run. ------------------------------------------------------------------------------------------------------

    def before_run(self, engine: Engine) -> None:
        """First of all: everything is built, nothing is loaded. The place to check options against the run."""

    def after_run(self, engine: Engine) -> None:
        """Last of all, always; `engine.error` says whether something was raised. Close files and trackers here."""

    def on_exception(self, engine: Engine, error: BaseException) -> None:
        """Something was raised (a KeyboardInterrupt included); after_train and after_run still follow."""

    def on_log(self, engine: Engine, record: Mapping[str, Any]) -> None:
        """A record was made: plain numbers and strings, on rank 0."""

    # Checkpoints. --------------------------------------------------------------------------------------------------

    def before_save_checkpoint(self, engine: Engine, checkpoint: dict[str, Any]) -> None:
        """A checkpoint is about to be written: metadata may be added to it; state belongs in `state_dict`."""

    def after_load_checkpoint(self, engine: Engine, checkpoint: dict[str, Any]) -> None:
        """A checkpoint was loaded, model and hook states included."""

    # Training. -----------------------------------------------------------------------------------------------------

    def before_train(self, engine: Engine) -> None:
        """Once before the first epoch, after loading."""

    def after_train(self, engine: Engine) -> None:
        """Once after the last epoch, always; `engine.error` says whether something was raised."""

    def before_train_epoch(self, engine: Engine) -> None:
        """Before each epoch; again inside one when a run resumes there (`engine.resumed_in_epoch`)."""

    def after_train_epoch(self, engine: Engine) -> None:
        """After each epoch; `engine.progress.epoch` counts it."""

    def before_train_iter(self, engine: Engine, batch_idx: int, batch: Any) -> None:
        """Before the forward pass; `batch_idx` counts from 0 within the epoch; `batch` is on the device."""

    def after_backward(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """Gradients of this iteration are there (scaled in fp16, accumulated within a window)."""

    def before_optimizer_step(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """Once a window, gradients unscaled and weighted: the place to clip or to inspect them."""

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """After each iteration; `engine.stepped` says whether the optimizer stepped in it. `outputs["loss"]` is the
        detached loss, a scalar tensor on the device."""

    # Validation and test. ------------------------------------------------------------------------------------------

    def before_val(self, engine: Engine) -> None:
        """Before a validation."""

    def after_val(self, engine: Engine) -> None:
        """After a validation."""

    def before_val_epoch(self, engine: Engine) -> None:
        """Before the validation loop."""

    def after_val_epoch(self, engine: Engine, metrics: Mapping[str, float]) -> None:
        """After the validation loop, with its metrics, reduced over all ranks; the training weights are back."""

    def before_val_iter(self, engine: Engine, batch_idx: int, batch: Any) -> None:
        """Before a validation batch."""

    def after_val_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """After a validation batch, with what the task's `evaluate` returned."""

    def before_test(self, engine: Engine) -> None:
        """Before the test."""

    def after_test(self, engine: Engine) -> None:
        """After the test."""

    def before_test_epoch(self, engine: Engine) -> None:
        """Before the test loop."""

    def after_test_epoch(self, engine: Engine, metrics: Mapping[str, float]) -> None:
        """After the test loop, with its metrics, reduced over all ranks; the training weights are back."""

    def before_test_iter(self, engine: Engine, batch_idx: int, batch: Any) -> None:
        """Before a test batch."""

    def after_test_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """After a test batch, with what the task's `evaluate` returned."""

    # The general points: called at the train, val and test points alike. ---------------------------------------------

    def before_epoch(self, engine: Engine, mode: Mode) -> None:
        """Before each train, val and test epoch; a class that also overrides the specific point gets both calls."""

    def after_epoch(self, engine: Engine, mode: Mode) -> None:
        """After each train, val and test epoch."""

    def before_iter(self, engine: Engine, batch_idx: int, batch: Any, mode: Mode) -> None:
        """Before each train, val and test iteration."""

    def after_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any], mode: Mode) -> None:
        """After each train, val and test iteration."""

    # State. --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs of this hook: tensors, numbers, strings, lists and dicts of these."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned in the run that is resumed."""

    # When is it due? ------------------------------------------------------------------------------------------------
    # MMEngine's helpers; `n` and `begin` are those of `schedule.Every`.

    def every_n_train_iters(self, engine: Engine, n: int, begin: int = 0) -> bool:
        """Whether the iteration just completed is a due one of every n."""
        return Every(n, begin).due(engine.progress.iteration)

    def every_n_iters(self, engine: Engine, n: int, begin: int = 0) -> bool:
        """The same as `every_n_train_iters`, by MMCV's name."""
        return self.every_n_train_iters(engine, n, begin)

    def every_n_epochs(self, engine: Engine, n: int, begin: int = 0) -> bool:
        """Whether the epoch just completed is a due one of every n."""
        return Every(n, begin).due(engine.progress.epoch)

    def every_n_inner_iters(self, batch_idx: int, n: int) -> bool:
        """Whether the batch at `batch_idx` (from 0, of any loop) is a due one of every n."""
        return Every(n).due(batch_idx + 1)

    def end_of_epoch(self, engine: Engine, batch_idx: int, mode: Mode = "train") -> bool:
        """Whether the batch at `batch_idx` is the last of the epoch, of the loop that `mode` names."""
        if mode == "train":
            return batch_idx + 1 == engine.epoch_length
        loader = engine.loaders.val if mode == "val" else engine.loaders.test
        return loader is not None and batch_idx + 1 == len(loader)

    def is_last_train_epoch(self, engine: Engine) -> bool:
        """Return whether this epoch is the last: at all mount points from its before_train_epoch on.

        False if training stops earlier than planned (`engine.stopping`), which is not known before.
        """
        return engine.epoch_begun == engine.max_epochs or engine.progress.iteration >= engine.max_iters

    def is_last_train_iter(self, engine: Engine) -> bool:
        """Whether the iteration just completed is the last."""
        return engine.progress.iteration >= engine.max_iters


_POINT_NAMES = frozenset(MOUNT_POINTS) | frozenset(GENERAL_POINTS)
_HELPERS = frozenset(name for name in vars(Hook) if not name.startswith("_")) - _POINT_NAMES
_PREFIXES = ("before_", "after_", "on_")


def _refuse_misspelt_mount_points(cls: type[Hook]) -> None:
    """Refuse methods of `cls` that look like a mount point and are none: nobody would ever call them."""
    for name, value in vars(cls).items():
        if name in _POINT_NAMES or name in _HELPERS or not inspect.isfunction(value):
            continue
        close = close_names(name, _POINT_NAMES, most=1)
        looks_like_one = name.startswith(_PREFIXES) or (bool(close) and _almost_equal(name, close[0]))
        if looks_like_one and not name.startswith("_"):
            raise UserError(
                f"{cls.__module__}.{cls.__qualname__} has a method {name!r}, which is no mount point",
                key=name,
                remedy=f"{suggestion(name, _POINT_NAMES)} A helper of your own begins with an underscore.",
            )


def _almost_equal(name: str, other: str) -> bool:
    """Whether the names differ by a transposition or two: `fater_train_iter`, `befor_run`."""
    return (
        len(name) > 6
        and (sorted(name) == sorted(other) or abs(len(name) - len(other)) == 1)
        and name[-4:] == other[-4:]
    )
