"""The options of the engine: `Settings`. It converts epochs to iterations, and limits to numbers of batches."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydraloop.errors import Remedy, UserError
from hydraloop.run_files.result import PAUSE

_CLOCK = re.compile(r"(\d+):([0-5]?\d):([0-5]?\d)")
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?) ?(s|min|h|d)")
_UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400}


def seconds_of(given: Any) -> float:
    """Return a time (`engine.max_time`) in seconds: `0:30:00`, `30min` or a number.

    None is infinity.

    Raises:
        UserError: it is not a time above 0.
    """
    if given is None:
        return math.inf
    clock = _CLOCK.fullmatch(str(given))
    amount = _AMOUNT.fullmatch(str(given))
    if amount is not None:
        found: float = float(amount[1]) * _UNITS[amount[2]]
    elif clock is not None:
        hours, minutes, seconds = map(int, clock.groups())
        found = (hours * 60 + minutes) * 60 + seconds
    else:  # YAML reads 1:30:00 as 5400
        found = given if isinstance(given, int | float) and not isinstance(given, bool) else 0
    if not found > 0:
        text = "Use hours, minutes and seconds (0:30:00), a number with s, min, h or d (30min), or seconds (1800)."
        remedy = Remedy(text, (str(given), "0:30:00"))
        raise UserError(f"{given!r} is not a time above 0", key="engine.max_time", remedy=remedy)
    return found


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of the engine; `hydraloop.schemas.engine.EngineConf` gives the reasons of the defaults."""

    max_epochs: int = 20
    max_iters: int | None = None
    accumulate: int = 1
    val_interval: int | None = 1
    val_begin: int = 0
    val_by_epoch: bool = True
    test: bool = True
    sanity_val_steps: int = 1
    limit_train_batches: int | float | None = None
    limit_val_batches: int | float | None = None
    limit_test_batches: int | float | None = None
    max_time: Any = None
    pause_after: int | None = None
    allow_nan: bool = False
    device: str = "auto"
    prefetch: bool = True
    channels_last: bool = False
    """Whether images are stored channels last on the device."""
    resume: Path | None = None
    """The checkpoint file to resume from."""
    resume_strict: bool = True
    optimizer_overrides: frozenset[str] = frozenset()
    """Hyperparameters (`lr`, with several optimizers `generator.lr`) whose values in the config replace those of the
    resumed checkpoint; `groups` and `layer_decay` stand for all of them."""
    every: Mapping[str, int] = field(default_factory=dict)
    """For each step of the task, by name: it runs in every n-th iteration. 1 if it is not here."""
    closures: Mapping[str, bool | None] = field(default_factory=dict)
    """For each optimizer, by name: whether `step` gets a closure. None, or not here: if `step` requires one."""
    load_from: Path | None = None
    """A checkpoint file or state dict to take weights from."""
    weights: str = "averaged"
    """`averaged` or `raw`: which weights `load_from`, validation and test use if there are both."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Plain values for every checkpoint's `meta` (the config, the experiment's name)."""

    @property
    def out_of_time(self) -> str:
        """The reason of a stop by `max_time`."""
        return f"engine.max_time={self.max_time}"

    @property
    def pause(self) -> str:
        """The reason of a preemption by `pause_after`."""
        return f"{PAUSE}={self.pause_after}"

    def limited(self, split: str, length: int) -> int:
        """Return how many of a loader's `length` batches a split uses (`limit_<split>_batches`)."""
        limit = getattr(self, f"limit_{split}_batches")
        if limit is None:
            return length
        return min(length, max(1, round(limit * length)) if isinstance(limit, float) else limit)
