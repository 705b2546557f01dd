"""The progress of a sweep whose files are written by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hydraloop.sweeps.report.progress import Progress
from hydraloop.sweeps.sweep_directory import SweepDirectory
from tests.sweeps.written import finished, sweep, write


@pytest.fixture
def directory(tmp_path: Path) -> SweepDirectory:
    """Six jobs; job 0 runs since second 100."""
    made = sweep(tmp_path / "sweep", "optimizer.lr=1e-3,1e-2,1e-1", "seed=0,1")
    write(made, {0: {"state": "running", "began": 100.0}})
    return made


def log(directory: SweepDirectory, job: int, *records: dict[str, Any], end: str = "\n") -> None:
    with (directory.folder(job) / "metrics.jsonl").open("a") as file:
        file.write("\n".join(json.dumps(record) for record in records) + end)


def test_a_job_shows_its_last_records(directory: SweepDirectory) -> None:
    progress = Progress.of(directory, directory.states())
    job = progress.running[0]
    progress.look()
    assert (job.iteration, job.loss, job.metric, job.seconds_left(110.0, None)) == (0, "", "", None)
    val = {"mode": "val", "epoch": 1, "iteration": 100, "accuracy": None, "nonfinite": {"accuracy": "nan"}}
    train = {"mode": "train", "epoch": 2, "iteration": 110, "eta": 30.0, "loss": 0.5, "timestamp": 120.0}
    log(directory, 0, val, train)
    progress.look()
    assert (job.iteration, job.loss, job.metric, job.seconds_left(130.0, None)) == (
        110,
        "loss 0.5000",
        "accuracy nan",
        20,
    )
    log(directory, 0, {**train, "iteration": 120}, end="")
    progress.look()
    assert job.iteration == 110, "the line is not complete"
    log(directory, 0, end="\n")
    progress.look()
    assert job.iteration == 120
    log(directory, 0, *({**train, "iteration": 120 + n, "text": "x" * 100} for n in range(200)), [])  # type: ignore[arg-type]
    progress.look()
    assert job.iteration == 319, "only the end of the log is read"


def test_records_of_an_earlier_attempt_tell_no_end(directory: SweepDirectory) -> None:
    log(directory, 0, {"mode": "train", "epoch": 1, "iteration": 90, "eta": 30.0, "loss": 0.5, "timestamp": 50.0})
    progress = Progress.of(directory, directory.states())
    progress.look()
    assert progress.running[0].iteration == 90
    assert progress.seconds_left(110.0) is None


def test_the_end_of_all_jobs_is_estimated(directory: SweepDirectory) -> None:
    log(directory, 0, {"mode": "train", "epoch": 1, "iteration": 90, "eta": 30.0, "loss": 0.5, "timestamp": 110.0})
    progress = Progress.of(directory, directory.states())
    progress.look()
    assert progress.seconds_left(110.0) == 30 + 5 * 40, "a job takes 40 s"
    write(directory, {1: {"state": "running", "began": 110.0}})
    progress.started(directory.state(1))
    progress.look()
    assert progress.seconds_left(110.0) == (30 + 40 + 4 * 40) / 2
    write(directory, {1: finished(0.5, seconds=20.0)})
    progress.ended(directory.state(1))
    assert progress.seconds_left(110.0) == 30 + 4 * 20
    write(directory, {0: finished(0.6, seconds=20.0)})
    progress.ended(directory.state(0))
    assert progress.seconds_left(110.0) is None, "nothing runs"


def test_jobs_are_counted_once_and_the_best_is_kept(directory: SweepDirectory) -> None:
    progress = Progress.of(directory, directory.states())
    assert +progress.counts == {"running": 1, "queued": 5}
    told = (0, finished(math.nan)), (1, finished(0.7)), (2, finished(0.6)), (3, finished(0.9, metric="other"))
    for number, state in (*told, (4, {"state": "failed", "error": "x", "value": 1.0})):
        progress.started(directory.state(number))
        write(directory, {number: state})
        progress.ended(directory.state(number))
    assert progress.best is not None
    assert progress.best.number == 1
    assert +progress.counts == {"finished": 4, "failed": 1, "queued": 1}
    progress.started(directory.state(4))
    assert +progress.counts == {"finished": 4, "running": 1, "queued": 1}
