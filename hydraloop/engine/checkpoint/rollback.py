"""Sets a run back to an earlier checkpoint while it trains."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hydraloop.engine.checkpoint import save_load
from hydraloop.engine.device import seeding

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine


class Rollback(BaseException):
    """Raised by a hook in training, on every rank at the same mount point between two windows: see `go_back`.

    Not an `Exception`, so that no `on_error` handles it.
    """

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(f"back to {checkpoint}")
        self.checkpoint = checkpoint


def go_back(engine: Engine, checkpoint: Path) -> None:
    """Restore the state in a checkpoint, also that of the generators, and call after_load_checkpoint.

    Requests for checkpoints are forgotten: they are of the part that is given up.

    Raises:
        UserError: the file does not fit.
    """
    began_at = engine.began_at
    engine._requests.forget_checkpoints()
    rng = save_load.restore(engine, checkpoint)
    engine.began_at = min(began_at, engine.progress.iteration)
    if rng is not None:
        seeding.set_rng_state(rng)
