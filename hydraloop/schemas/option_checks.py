"""Checks of the range and the choices of options. Imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

from hydraloop.errors import UserError, suggestion

CHECKPOINTS = ("best", "last", "all")
"""Values of the option `checkpoints` of trackers."""
_CLOCK = re.compile(r"(\d+):([0-5]?\d):([0-5]?\d)")
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?) ?(s|min|h|d)")
_UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400}


def check_at_least(least: int, remedy: str = "", /, **options: float | None) -> None:
    """Reject options, given by key, that are below `least`; None is accepted."""
    for key, value in options.items():
        if value is not None and not value >= least:
            fix = remedy or f"Use {least} or more."
            raise UserError(f"{value} is below {least}", key=key, remedy=fix)


def check_above(limit: int, null: str = "", /, **options: float | None) -> None:
    """Reject options, given by key, that are not above `limit`; None is accepted.

    Args:
        null: what None means, if an option may be None: `null to switch it off`.
    """
    for key, value in options.items():
        if value is not None and not value > limit:
            remedy = f"Use a number above {limit}{', or ' if null else ''}{null}."
            raise UserError(f"{value} is not above {limit}", key=key, remedy=remedy)


def check_choice(choices: tuple[str, ...], /, **options: str | None) -> None:
    """Reject options, given by key, that are not one of `choices`; None is accepted."""
    for key, value in options.items():
        if value is not None and value not in choices:
            remedy = suggestion(value, choices)
            raise UserError(f"{value!r} is not one of {', '.join(choices)}", key=key, remedy=remedy)


def names_or_callables(key: str, given: Any, names: tuple[str, ...], what: str) -> list[Any]:
    """Return an option that is a name, something callable, or several of these, as a list.

    Args:
        names: those that are known.
        what: a name or a callable is, for the error.

    Raises:
        UserError: a name is unknown, or an item is neither a name nor callable.
    """
    several = [given] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    for one in several:
        if isinstance(one, str):
            check_choice(names, **{key: one})
        elif not callable(one):
            raise UserError(
                f"{one!r} is not a {what}",
                key=key,
                remedy=f"Use one of {', '.join(names)}, or a mapping with `_target_`: [{{_target_: my_project.mine}}].",
            )
    return several


def seconds_of(given: Any, key: str = "engine.max_time") -> float:
    """Return a time, the option `key`, in seconds: `0:30:00`, `30min` or a number.

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
        remedy = "Use hours, minutes and seconds (0:30:00), a number with s, min, h or d (30min), or seconds (1800)."
        raise UserError(f"{given!r} is not a time above 0", key=key, remedy=remedy)
    return found
