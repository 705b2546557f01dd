"""The entries of every record that say where in the run it belongs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hydraloop.errors import UserError
from hydraloop.run.record_log import NONFINITE, STAMP

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine
    from hydraloop.engine.hook import Mode

POSITION = ("mode", "epoch", "iteration")
"""The first entries."""
RESERVED = (*POSITION, NONFINITE, STAMP)
"""With the last entries: the time, and the names of values that are not finite."""


def position(engine: Engine, mode: Mode) -> dict[str, Any]:
    """Return the first entries of a record: `{"mode", "epoch", "iteration"}`. No host sync.

    `epoch` counts from 1 and includes the current one; `iteration` counts completed ones.
    """
    progress = engine.progress
    return {"mode": mode, "epoch": progress.epoch + (progress.batch_in_epoch > 0), "iteration": progress.iteration}


def check_names(names: Iterable[str], *, key: str | None = None, remedy: str) -> None:
    """Reject names that every record already uses.

    Args:
        key: of the names in the config, for the error.

    Raises:
        UserError: a name is one of `RESERVED`.
    """
    for name in names:
        if name in RESERVED:
            raise UserError(
                f"every record already has an entry {name!r}",
                key=None if key is None else f"{key}.{name}",
                remedy=remedy,
            )
