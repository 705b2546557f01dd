"""Checks of numbers that several hooks take as options."""

from __future__ import annotations

from hydraloop.errors import UserError


def check_at_least(least: int, **options: float | None) -> None:
    """Reject options below `least`; None is accepted.

    Raises:
        UserError: an option is below `least`, or NaN; names it.
    """
    for name, value in options.items():
        if value is not None and not value >= least:
            raise UserError(f"{value} is below {least}", key=name, remedy=f"Use {least} or more.")


def check_above_zero(**options: float | None) -> None:
    """Reject options that are not above 0; None is accepted.

    Raises:
        UserError: an option is 0, negative, or NaN; names it.
    """
    for name, value in options.items():
        if value is not None and not value > 0:
            raise UserError(f"{value} is not above 0", key=name, remedy="Use a number above 0.")
