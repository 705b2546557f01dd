"""Attributes that `Engine` had earlier. They work for one release, with a warning that names the new one."""

from __future__ import annotations

import warnings
from operator import attrgetter
from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type)

NEW_NAMES = {
    "asked_at": "batches.asked_at",
    "batch_samples": "stepper.batch_samples",
    "began_at": "progress.began_at",
    "data_seconds": "batches.waited",
    "diverged": "loss_check.diverged",
    "epoch_begun": "progress.epoch_begun",
    "evaluating_checkpoint": "evaluator.tested_checkpoint",
    "evaluation_length": "evaluator.length",
    "git": "checkpoints.git",
    "groups": "run.groups",
    "higher_is_better": "evaluator.higher_is_better",
    "hyperparameters": "checkpoints.optimizers.hyperparameters",
    "last_checkpoint": "checkpoints.last_checkpoint",
    "loss_weights": "stepper.loss_weights",
    "matrix_names": "evaluator.matrix_names",
    "on_device": "batches.on_device",
    "preempted_by": "requests.preempted_by",
    "preempting": "requests.preempting",
    "report_best": "evaluator.report_best",
    "resumed_from": "checkpoints.resumed_from",
    "rewrap": "stepper.rewrap",
    "saved_iteration": "checkpoints.saved_iteration",
    "schedulers": "run.schedules",
    "settle_saves": "checkpoints.settle",
    "stages": "calls",
    "stepping": "stepper.optimizer",
    "train_loader": "batches.train_loader",
    "tried": "evaluator.names_are_known",
    "window_closed": "stepper.window_closed",
    "without_set": "evaluator.without_data_set",
}


def with_deprecated_names(cls: _Class) -> _Class:
    """Give a class the deprecated attributes."""
    for old, new in NEW_NAMES.items():
        setattr(cls, old, property(_reader(old, new)))
    cls.loaders = cls.loaders.setter(_use_loaders)  # type: ignore[attr-defined]  # a class with this property
    return cls


def _use_loaders(engine: Any, loaders: Any) -> None:
    _warn("loaders = …", "batches.use(…)")
    engine.batches.use(loaders)


def _reader(old: str, new: str) -> Any:
    read = attrgetter(new)

    def warn_and_read(engine: Any) -> Any:
        _warn(old, new)
        return read(engine)

    return warn_and_read


def _warn(old: str, new: str) -> None:
    text = f"engine.{old} is deprecated and ends with the next release: use engine.{new}"
    warnings.warn(text, DeprecationWarning, stacklevel=3)  # the caller of the property
