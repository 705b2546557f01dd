"""Where in the run a record belongs: the entries that each has in front."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hydraloop.errors import UserError
from hydraloop.run.record_log import NONFINITE, STAMP

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine
    from hydraloop.engine.hook import Mode

POSITION = ("mode", "epoch", "iteration")
"""The entries in front."""
RESERVED = (*POSITION, NONFINITE, STAMP)
"""With those at the end of the line: the time, and what is not finite."""


def position(engine: Engine, mode: Mode) -> dict[str, Any]:
    """The first entries of a record made now: `{"mode", "epoch", "iteration"}`.

    `epoch` counts from 1, the current one included; `iteration` those completed. No host sync.
    """
    progress = engine.progress
    return {"mode": mode, "epoch": progress.epoch + (progress.batch_in_epoch > 0), "iteration": progress.iteration}


def check_names(names: Iterable[str], *, key: str | None = None, remedy: str) -> None:
    """Refuse entries that would hide where in the run their record belongs.

    Args:
        key: where the name is given, up to the name itself; None where no key applies.

    Raises:
        UserError: a name is one of `position`'s, the time's, or `nonfinite`.
    """
    for name in names:
        if name in RESERVED:
            raise UserError(
                f"the name {name!r} is that of an entry of every record, which says where in the run it belongs",
                key=None if key is None else f"{key}.{name}",
                remedy=remedy,
            )
