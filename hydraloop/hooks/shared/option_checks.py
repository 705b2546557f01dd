"""Checks of options that several hooks have."""

from __future__ import annotations

from typing import Any, Self

from hydraloop.errors import RENAMED, UserError, suggestion

CHECKPOINTS = ("best", "last", "all")
"""Values of the option `checkpoints` of trackers."""
_OR_NULL = ", or null to switch it off"


def check_at_least(least: int, *, null: bool = False, **options: float | None) -> None:
    """Reject options below `least`; None is accepted.

    Args:
        null: whether null is a choice that the error should mention.
    """
    for name, value in options.items():
        if value is not None and not value >= least:
            raise UserError(f"{value} is below {least}", key=name, remedy=f"Use {least} or more{_OR_NULL * null}.")


def check_above_zero(*, null: bool = False, **options: float | None) -> None:
    """Reject options that are not above 0, as `check_at_least` does."""
    for name, value in options.items():
        if value is not None and not value > 0:
            raise UserError(f"{value} is not above 0", key=name, remedy=f"Use a number above 0{_OR_NULL * null}.")


def check_choice(choices: tuple[str, ...], **options: str | None) -> None:
    """Reject options that are not one of `choices`; None is accepted."""
    for name, value in options.items():
        if value is not None and value not in choices:
            remedy = suggestion(value, choices)
            raise UserError(f"{value!r} is not one of {', '.join(choices)}", key=name, remedy=remedy)


class RefusesOldNames:
    """Base of hooks with renamed options: an earlier name is an error with the new one, also in Python."""

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        for name in options.keys() & RENAMED.keys():
            raise UserError(f"{cls.__name__} takes no argument {name!r}", key=name, remedy=f"Use {RENAMED[name]}.")
        return super().__new__(cls)
