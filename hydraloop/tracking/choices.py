"""What the hooks of several trackers check in the same way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hydraloop.errors import UserError, suggestion
from hydraloop.tracking.checkpoints import CHOICES

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine
    from hydraloop.tracking.hook import TrackerHook


def check_checkpoints(checkpoints: str | None) -> None:
    """Which checkpoint files are stored at the service.

    Raises:
        UserError: it is none of `best`, `last`, `all` and None.
    """
    if checkpoints is not None and checkpoints not in CHOICES:
        remedy = suggestion(checkpoints, CHOICES)
        raise UserError(f"there is no choice {checkpoints!r}", key="checkpoints", remedy=remedy)


def check_only_one(engine: Engine, hook: TrackerHook, what: str) -> None:
    """Two hooks of a class would do the same twice.

    Args:
        engine: of the run.
        hook: one of them.
        what: both would make, or write.

    Raises:
        UserError: there is another one of its class.
    """
    same = [name for name, other in engine.hooks.items() if type(other) is type(hook)]
    if len(same) > 1:
        raise UserError(f"{' and '.join(same)} would {what}", key=hook.key, remedy="Leave one of them out.")
