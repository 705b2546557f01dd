"""Checks of the range and the choices of options. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hydraloop.errors import Remedy, UserError, suggestion

CHECKPOINTS = ("best", "last", "all")
"""Values of the option `checkpoints` of trackers."""


def check_at_least(least: int, remedy: str = "", /, **options: float | None) -> None:
    """Reject options, given by key, that are below `least`; None is accepted."""
    for key, value in options.items():
        if value is not None and not value >= least:
            fix = Remedy(remedy or f"Use {least} or more.", (str(value), str(least)))
            raise UserError(f"{value} is below {least}", key=key, remedy=fix)


def check_above(limit: int, null: str = "", /, **options: float | None) -> None:
    """Reject options, given by key, that are not above `limit`; None is accepted.

    Args:
        null: what None means, if an option may be None: `null to switch it off`.
    """
    for key, value in options.items():
        if value is not None and not value > limit:
            text = f"Use a number above {limit}{', or ' if null else ''}{null}."
            remedy = Remedy(text, (str(value), "null" if null else str(limit + 1)))
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
