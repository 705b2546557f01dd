"""Options of schedules that are out of range: one message each, with the key of the option."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hydraloop.errors import UserError
from hydraloop.optim.functions import Function


class _Range(NamedTuple):
    """What an argument may be."""

    holds: Callable[[float], bool]
    words: str
    whole: bool = False


_ABOVE_0 = _Range(lambda value: value > 0, "a number above 0")
_FROM_0 = _Range(lambda value: value >= 0, "a number from 0")
_SHARE = _Range(lambda value: 0 <= value <= 1, "a number from 0 to 1")
_SHARE_ABOVE_0 = _Range(lambda value: 0 < value <= 1, "a number above 0, up to 1")
_COUNT = _Range(lambda value: value >= 1, "a whole number from 1", whole=True)
_COUNT_FROM_0 = _Range(lambda value: value >= 0, "a whole number from 0", whole=True)
_BELOW_1 = _Range(lambda value: 0 < value < 1, "a number between 0 and 1")

_RANGES = {
    **dict.fromkeys(("T_max", "milestones", "periods", "step_size", "total_iters", "total_steps"), _COUNT),
    **dict.fromkeys(("cooldown", "num_last_epochs", "patience", "warmup_iters"), _COUNT_FROM_0),
    **dict.fromkeys(("div_factor", "final_div_factor", "gamma", "max_lr", "power", "restart_weights"), _ABOVE_0),
    **dict.fromkeys(("eps", "eta_min", "min_lr", "threshold"), _FROM_0),
    **dict.fromkeys(("base_momentum", "end_factor", "max_momentum", "min_lr_ratio", "pct_start"), _SHARE),
    **dict.fromkeys(("start_factor", "warmup_ratio"), _SHARE_ABOVE_0),
}
_FACTOR = {"Constant": _SHARE_ABOVE_0, "Plateau": _BELOW_1}
_CHOICES = {"anneal_strategy": ("cos", "linear"), "mode": ("min", "max"), "threshold_mode": ("rel", "abs")}


def check_arguments(function: Function, key: str) -> None:
    """Refuse arguments of hydraloop's schedules that are out of range.

    Args:
        function: of the step; a custom one checks its own arguments.
        key: the schedule's key in the config.

    Raises:
        UserError: names the argument.
    """
    if not type(function).__module__.startswith("hydraloop.optim"):
        return
    ranges = {**_RANGES, "factor": _FACTOR.get(type(function).__name__)}
    for name, value in vars(function).items():
        if value is None:
            continue
        if name in _CHOICES and value not in _CHOICES[name]:
            raise UserError(f"{value!r} is unknown", key=f"{key}.{name}", remedy=f"Use {' or '.join(_CHOICES[name])}.")
        wanted = ranges.get(name)
        if wanted is not None:
            _check_range(value, wanted, f"{key}.{name}")
    milestones = getattr(function, "milestones", None)
    if milestones is not None and list(milestones) != sorted(set(milestones)):
        raise UserError(
            f"{list(milestones)} is not ascending",
            key=f"{key}.milestones",
            remedy=f"Give each once, in order: {sorted(set(milestones))}.",
        )


def check_begin_and_end(begin: Any, end: Any, key: str) -> None:
    """Refuse a `begin` that is not before the `end`.

    Raises:
        UserError: the same, or one is not a whole number from 0.
    """
    for name, value in (("begin", begin), ("end", end)):
        if not isinstance(value, int) and not (name == "end" and value is None):
            raise UserError(f"{value!r} is not a whole number", key=f"{key}.{name}", remedy="Use 0 or more.")
    if begin < 0:
        raise UserError(f"{begin} is negative", key=f"{key}.begin", remedy="Use 0 for the start of training.")
    if end is not None and begin >= end:
        raise UserError(
            f"{begin} is not before the end, {end}",
            key=f"{key}.begin",
            remedy=f"Use a begin below {end}, a later {key}.end, or {key}.end=null for the end of training.",
        )


def check_room(function: Function, length: int, key: str, unit: str) -> None:
    """Refuse a warm-up, or last epochs, for which the schedule is too short.

    Args:
        function: of the step.
        length: of the schedule, in `unit`.
        key: the schedule's key in the config.
        unit: "epochs" or "optimizer steps".

    Raises:
        UserError: they do not fit in.
    """
    parts = {name: getattr(function, name, None) or 0 for name in ("warmup_iters", "num_last_epochs")}
    length = getattr(function, "total_iters", None) or length
    if not any(parts.values()) or sum(parts.values()) < length:
        return
    longest = max(parts, key=lambda name: parts[name])
    together = " and ".join(f"{name}={value}" for name, value in parts.items() if value)
    raise UserError(
        f"{together}: of the schedule's {length} {unit} nothing is left for the cosine",
        key=f"{key}.{longest}",
        remedy=f"Train longer, use less, or {key}.{longest}=null, a share of the length that fits short runs too.",
    )


def _check_range(value: Any, wanted: _Range, key: str) -> None:
    several = isinstance(value, Sequence) and not isinstance(value, str)
    for number in value if several else [value]:
        is_number = isinstance(number, int if wanted.whole else int | float) and not isinstance(number, bool)
        if not is_number or not math.isfinite(number) or not wanted.holds(number):
            raise UserError(f"{number!r} is out of range", key=key, remedy=f"Use {wanted.words}.")
