"""What a job's ranks leave in its temporary folder for the launching process and for their successors."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hydraloop.launch.job import Job
from hydraloop.launch.outcome import Outcome, cause
from hydraloop.run import atomic
from hydraloop.run import directory as run_directory

log = logging.getLogger(__name__)


def path_of(folder: Path, attempt: int, rank: int) -> Path:
    """Where a rank's outcome is.

    Args:
        attempt: 0 for the first start, n for the n-th restart.
    """
    return folder / f"outcome-{attempt}-{rank}.json"


def put(folder: Path, attempt: int, outcome: Outcome) -> None:
    """Write it, all of it or nothing."""
    atomic.write_text(path_of(folder, attempt, outcome.rank), outcome.to_json())


def outcomes(folder: Path, attempt: int | None = None) -> list[Outcome]:
    """Those of the ranks that left one; of one attempt or, with None, of all."""
    pattern = f"outcome-{'*' if attempt is None else attempt}-*.json"
    return [Outcome.from_json(path.read_bytes()) for path in sorted(folder.glob(pattern))]


def restarted(job: Job, told: Sequence[Outcome], attempt: int) -> Job:
    """The job of a restart: it goes on from the newest checkpoint it has written; says so.

    Args:
        told: how the attempt before ended.
    """
    newest = run_directory.newest_checkpoint(Path(job.run_dir), since=job.began)
    checkpoint = job.checkpoint if newest is None else str(newest.absolute())
    found = cause(told)
    why = "a rank was killed" if found is None or found.kind in ("lost", "signal", "consequence") else found.error()
    log.warning("restart %d, since %s; from %s", attempt, why, checkpoint or "the beginning")
    return replace(job, checkpoint=checkpoint)
