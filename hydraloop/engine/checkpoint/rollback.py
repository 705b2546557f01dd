"""Sets a run back to an earlier checkpoint while it trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hydraloop.engine.checkpoint import save_load
from hydraloop.engine.device import seeding

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine


class Rollback(BaseException):
    """Raised by a hook in training, on every rank at the same mount point between two windows; the engine goes back.

    Not an `Exception`, so that no `on_error` handles it.
    """

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(f"back to {checkpoint}")
        self.checkpoint = checkpoint


def with_rollbacks(engine: Engine, work: Callable[[], object]) -> None:
    """Do the work. After a `Rollback`, go back and do it again; the hooks that are called then may raise another one.

    Raises:
        UserError: the checkpoint of a `Rollback` does not fit.
    """
    checkpoint: Path | None = None
    while True:
        try:
            if checkpoint is not None:
                _go_back(engine, checkpoint)
            work()
            return
        except Rollback as rollback:
            checkpoint = rollback.checkpoint


def _go_back(engine: Engine, checkpoint: Path) -> None:
    """Restore the state in a checkpoint, also that of the generators, and call after_load_checkpoint and at_position.

    Requests for checkpoints and the best validation are forgotten: they are of the part that is given up.
    """
    engine.settle_saves()
    began_at = engine.began_at
    engine._requests.forget_checkpoints()
    engine.best = None  # `checkpoint` reports that of the restored state
    rng = save_load.restore(engine, checkpoint)
    engine.began_at = min(began_at, engine.progress.iteration)
    engine._call(engine.stages.at_position)
    if rng is not None:
        seeding.set_rng_state(rng)
