"""The progress of a sweep whose files are written by hand."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hydraloop.sweeps.progress import Progress
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
    progress.read_records()
    assert (job.iteration, job.loss, job.metric, job.until) == (0, "", "", None)
    val = {"mode": "val", "epoch": 1, "iteration": 100, "accuracy": None, "nonfinite": {"accuracy": "nan"}}
    train = {"mode": "train", "epoch": 2, "iteration": 110, "eta": 30.0, "time": 0.5, "loss": 0.5, "timestamp": 120.0}
    log(directory, 0, val, train)
    progress.read_records()
    assert (job.iteration, job.loss, job.metric, job.until) == (110, "loss 0.5000", "accuracy nan", 150.0)
    log(directory, 0, {**train, "iteration": 120}, end="")
    progress.read_records()
    assert job.iteration == 110, "the line is not complete"
    log(directory, 0, end="\n")
    progress.read_records()
    assert job.iteration == 120
    log(directory, 0, *({**train, "iteration": 120 + n, "text": "x" * 100} for n in range(200)), [])  # type: ignore[arg-type]
    progress.read_records()
    assert job.iteration == 319, "only the end of the log is read"


def test_records_of_an_earlier_attempt_tell_no_end(directory: SweepDirectory) -> None:
    log(directory, 0, {"mode": "train", "epoch": 1, "iteration": 90, "eta": 30.0, "loss": 0.5, "timestamp": 50.0})
    progress = Progress.of(directory, directory.states())
    progress.read_records()
    assert progress.running[0].iteration == 90
    assert progress.running[0].until is None


def test_the_end_of_all_jobs_is_estimated(directory: SweepDirectory) -> None:
    progress = Progress.of(directory, directory.states())
    assert progress.seconds_left() is None, "no job has finished"
    for number in (1, 2):
        progress.started(directory.state(number))
    write(directory, {1: finished(0.5, seconds=20.0)})
    progress.ended(directory.state(1))
    assert progress.seconds_left() == 5 * 20 / 2
    asked = Progress.of(directory, directory.states()[:3])
    assert asked.seconds_left() == 5 * 20, "also for the jobs that a search has not asked for yet"
    for number in (0, 2):
        write(directory, {number: finished(0.6, seconds=20.0)})
        progress.ended(directory.state(number))
    assert progress.seconds_left() is None, "nothing runs"


def test_jobs_are_counted_once_and_the_best_is_kept(directory: SweepDirectory) -> None:
    progress = Progress.of(directory, directory.states())
    assert +Counter(progress.states.values()) == {"running": 1, "queued": 5}
    told = (0, finished(math.nan)), (1, finished(0.7)), (2, finished(0.6)), (3, finished(0.9, metric="other"))
    for number, state in (*told, (4, {"state": "failed", "error": "x", "value": 1.0})):
        progress.started(directory.state(number))
        write(directory, {number: state})
        progress.ended(directory.state(number))
    assert progress.best is not None
    assert progress.best.number == 1
    assert +Counter(progress.states.values()) == {"finished": 4, "failed": 1, "queued": 1}
    progress.started(directory.state(4))
    assert +Counter(progress.states.values()) == {"finished": 4, "running": 1, "queued": 1}
