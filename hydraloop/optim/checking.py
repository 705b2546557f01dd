"""Arguments of schedules that are out of range: one message each, with the key of the argument.

torch takes some of them without a word (a negative patience, milestones in any order) and fails or does nothing later.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hydraloop.errors import UserError


class Range(NamedTuple):
    """What an argument may be."""

    holds: Callable[[float], bool]
    words: str
    whole: bool = False


_ABOVE_0 = Range(lambda value: value > 0, "a number above 0")
_FROM_0 = Range(lambda value: value >= 0, "a number from 0")
_SHARE = Range(lambda value: 0 <= value <= 1, "a number from 0 to 1")
_SHARE_ABOVE_0 = Range(lambda value: 0 < value <= 1, "a number above 0, up to 1")
_BETWEEN = Range(lambda value: 0 < value < 1, "a number between 0 and 1")
_COUNT = Range(lambda value: value >= 1, "a whole number from 1", whole=True)
_COUNT_FROM_0 = Range(lambda value: value >= 0, "a whole number from 0", whole=True)

_RANGES: dict[str, Range] = {
    **dict.fromkeys(("T_0", "T_max", "epochs", "step_size", "step_size_down", "step_size_up", "T_mult"), _COUNT),
    **dict.fromkeys(("total_iters", "total_steps", "milestones"), _COUNT),
    **dict.fromkeys(("cooldown", "num_last_epochs", "patience", "warmup_iters"), _COUNT_FROM_0),
    **dict.fromkeys(("div_factor", "final_div_factor", "gamma", "max_lr", "power"), _ABOVE_0),
    **dict.fromkeys(("base_lr", "eps", "eta_min", "min_lr", "threshold"), _FROM_0),
    **dict.fromkeys(("base_momentum", "end_factor", "max_momentum", "min_lr_ratio", "pct_start"), _SHARE),
    **dict.fromkeys(("start_factor", "warmup_ratio"), _SHARE_ABOVE_0),
}
_RANGES_OF: dict[str, dict[str, Range]] = {
    "ConstantLR": {"factor": _SHARE_ABOVE_0},
    "ReduceLROnPlateau": {"factor": _BETWEEN},
}
_CHOICES_OF: dict[str, dict[str, tuple[str, ...]]] = {
    "OneCycleLR": {"anneal_strategy": ("cos", "linear")},
    "ReduceLROnPlateau": {"mode": ("min", "max"), "threshold_mode": ("rel", "abs")},
}


def check_arguments(factory: functools.partial[Any], key: str) -> None:
    """Refuse arguments out of range, of schedulers of torch and of ours; null is left to the scheduler.

    Args:
        factory: of a scheduler.
        key: the schedule's place in the config.

    Raises:
        UserError: one is.
    """
    if not str(getattr(factory.func, "__module__", "")).startswith(("torch.optim", "hydraloop.optim")):
        return
    kind = factory.func.__name__
    ranges = _RANGES | _RANGES_OF.get(kind, {})
    choices = _CHOICES_OF.get(kind, {})
    for name, value in factory.keywords.items():
        if value is None:
            continue
        if name in choices and value not in choices[name]:
            raise UserError(f"{value!r} is unknown", key=f"{key}.{name}", remedy=f"Use {' or '.join(choices[name])}.")
        if name in ranges:
            _check_range(value, ranges[name], f"{key}.{name}")
    _check_ascending(factory.keywords.get("milestones"), key)


def check_begin_and_end(begin: Any, end: Any, key: str) -> None:
    """Refuse what is no stretch of the training.

    Raises:
        UserError: one is no whole number from 0, or `begin` is not before `end`.
    """
    for name, value in (("begin", begin), ("end", end)):
        if not isinstance(value, int) and not (name == "end" and value is None):
            raise UserError(f"{value!r} is no whole number", key=f"{key}.{name}", remedy="Use 0 or more.")
    if begin < 0:
        raise UserError(f"{begin} is negative", key=f"{key}.begin", remedy="Use 0 for the start of training.")
    if end is not None and begin >= end:
        raise UserError(
            f"{begin} is not before the end, {end}",
            key=f"{key}.begin",
            remedy=f"Use a begin below {end}, a later {key}.end, or {key}.end=null for the end of training.",
        )


def check_room(arguments: Mapping[str, Any], length: int, key: str, unit: str) -> None:
    """Refuse a warm-up, or last epochs, that the schedule has no room for.

    Not shrunk: a run of which the warm-up takes all is seldom what was meant, and null fits each run, a short one for
    debugging too.

    Args:
        arguments: of the scheduler.
        length: of the schedule, in `unit`.
        key: the schedule's place in the config.
        unit: "epochs" or "optimizer steps".

    Raises:
        UserError: they do not fit in.
    """
    parts = {name: arguments.get(name) or 0 for name in ("warmup_iters", "num_last_epochs")}
    if not any(parts.values()) or sum(parts.values()) < length:
        return
    longest = max(parts, key=lambda name: parts[name])
    together = " and ".join(f"{name}={value}" for name, value in parts.items() if value)
    raise UserError(
        f"{together}: of the schedule's {length} {unit} nothing is left for the cosine",
        key=f"{key}.{longest}",
        remedy=f"Train longer, use less, or {key}.{longest}=null, a share of the length that fits short runs too.",
    )


def _check_range(value: Any, wanted: Range, key: str) -> None:
    several = isinstance(value, Sequence) and not isinstance(value, str)
    for number in value if several else [value]:
        is_number = isinstance(number, int if wanted.whole else int | float) and not isinstance(number, bool)
        if not is_number or not math.isfinite(number) or not wanted.holds(number):
            raise UserError(f"{number!r} is out of range", key=key, remedy=f"Use {wanted.words}.")


def _check_ascending(milestones: Any, key: str) -> None:
    if milestones is not None and list(milestones) != sorted(set(milestones)):
        raise UserError(
            f"{list(milestones)} is not ascending",
            key=f"{key}.milestones",
            remedy=f"Give each once, in order: {sorted(set(milestones))}.",
        )
