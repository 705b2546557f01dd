"""Sets a run back to an earlier checkpoint while it trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


class Rollback(BaseException):
    """Raised by a hook in training, on every rank at the same mount point between two windows; the engine goes back.

    Not an `Exception`, so that no `on_error` handles it.
    """

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(f"back to {checkpoint}")
        self.checkpoint = checkpoint


def with_rollbacks(work: Callable[[], object], go_back: Callable[[Path], object]) -> None:
    """Do the work. After a `Rollback`, go back and do it again; the hooks that are called then may raise another one.

    Args:
        work: of the run.
        go_back: restores the state in a checkpoint.

    Raises:
        UserError: the checkpoint of a `Rollback` does not fit.
    """
    checkpoint: Path | None = None
    while True:
        try:
            if checkpoint is not None:
                go_back(checkpoint)
            work()
            return
        except Rollback as rollback:
            checkpoint = rollback.checkpoint
