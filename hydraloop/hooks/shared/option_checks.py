"""Checks of numbers that several hooks take as options."""

from __future__ import annotations

from hydraloop.errors import UserError

_OR_NULL = ", or null to switch it off"


def check_at_least(least: int, *, null: bool = False, **options: float | None) -> None:
    """Reject options below `least`; None is accepted.

    Args:
        null: whether null is a choice that the error should mention.

    Raises:
        UserError: an option is below `least`, or NaN; names it.
    """
    for name, value in options.items():
        if value is not None and not value >= least:
            raise UserError(f"{value} is below {least}", key=name, remedy=f"Use {least} or more{_OR_NULL * null}.")


def check_above_zero(*, null: bool = False, **options: float | None) -> None:
    """Reject options that are not above 0, as `check_at_least` does.

    Raises:
        UserError: an option is 0, negative, or NaN; names it.
    """
    for name, value in options.items():
        if value is not None and not value > 0:
            raise UserError(f"{value} is not above 0", key=name, remedy=f"Use a number above 0{_OR_NULL * null}.")
