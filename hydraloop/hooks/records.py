"""Where in the run a record belongs: the entries that each has in front."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine
    from hydraloop.engine.hook import Mode


def position(engine: Engine, mode: Mode) -> dict[str, Any]:
    """The first entries of a record made now: `{"mode", "epoch", "iteration"}`.

    `epoch` counts from 1, the current one included; `iteration` those completed. No host sync.
    """
    progress = engine.progress
    return {"mode": mode, "epoch": progress.epoch + (progress.batch_in_epoch > 0), "iteration": progress.iteration}
