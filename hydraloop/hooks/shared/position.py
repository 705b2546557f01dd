"""What hooks derive from the position of a run at `at_position`."""

from __future__ import annotations

from hydraloop.engine.progress import Progress


def last_begun_epoch(progress: Progress) -> int:
    """Return the number (from 0) of the epoch that began last; 0 before the first.

    Between two epochs, it is the completed one: a validation that a resumed run has missed belongs to it.
    """
    between_epochs = progress.batch_in_epoch == 0
    return max(progress.epoch - between_epochs, 0)
