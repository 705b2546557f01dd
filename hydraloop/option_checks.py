"""Checks of the range and the choices of options. Imports no torch."""

from __future__ import annotations

from hydraloop.errors import UserError, suggestion

CHECKPOINTS = ("best", "last", "all")
"""Values of the option `checkpoints` of trackers."""


def check_at_least(least: int, remedy: str = "", /, **options: float | None) -> None:
    """Reject options, given by key, that are below `least`; None is accepted."""
    for key, value in options.items():
        if value is not None and not value >= least:
            raise UserError(f"{value} is below {least}", key=key, remedy=remedy or f"Use {least} or more.")


def check_above(limit: int, remedy: str = "", /, **options: float | None) -> None:
    """Reject options, given by key, that are not above `limit`; None is accepted."""
    for key, value in options.items():
        if value is not None and not value > limit:
            raise UserError(f"{value} is not above {limit}", key=key, remedy=remedy or f"Use a number above {limit}.")


def check_choice(choices: tuple[str, ...], /, **options: str | None) -> None:
    """Reject options, given by key, that are not one of `choices`; None is accepted."""
    for key, value in options.items():
        if value is not None and value not in choices:
            remedy = suggestion(value, choices)
            raise UserError(f"{value!r} is not one of {', '.join(choices)}", key=key, remedy=remedy)
