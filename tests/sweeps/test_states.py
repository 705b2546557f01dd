"""The state of a job in `job.json`, and what `result.json` tells of a job that was killed."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hydraloop.files.result import Best, Objective, Result, digest
from hydraloop.sweeps import job_states
from hydraloop.sweeps.job_states import FILENAME, JobState

RUNNING = JobState(3, "running", ("optimizer.lr=1e-3",), attempts=1, directory="3", began=time.time())
FINISHED = Result(
    "finished",
    val_metrics={"loss": 0.5, "accuracy": 0.75},
    objective=Objective("accuracy", "greater", 0.75, 40),
    progress={"epoch": 2, "iteration": 40},
    seconds=3.0,
)


@pytest.mark.parametrize("value", [None, 0.5, math.inf])
def test_it_is_read_as_it_was_written(tmp_path: Path, value: float | None) -> None:
    state = replace(RUNNING, state="finished", value=value, rule="less")
    job_states.write(tmp_path, state, flush=True)
    assert job_states.read(tmp_path) == state
    assert state.is_over
    assert not RUNNING.is_over


def test_nan_and_invalid_unicode_are_kept(tmp_path: Path) -> None:
    job_states.write(tmp_path, replace(RUNNING, value=math.nan, overrides=("name=\udcff",)), flush=False)
    found = job_states.read(tmp_path)
    assert found is not None
    assert found.value is not None
    assert math.isnan(found.value)
    assert found.overrides == ("name=\udcff",)


def test_a_torn_file_is_no_state(tmp_path: Path) -> None:
    assert job_states.read(tmp_path) is None
    job_states.write(tmp_path, RUNNING, flush=False)
    content = (tmp_path / FILENAME).read_bytes()
    for size in range(len(content) - 1):  # the last byte is a newline
        (tmp_path / FILENAME).write_bytes(content[:size])
        assert job_states.read(tmp_path) is None, size
    for other in ({}, [], {"number": 1}, {**json.loads(content), "new": 1}):
        (tmp_path / FILENAME).write_text(json.dumps(other))
        assert job_states.read(tmp_path) is None


def test_a_result_that_was_written_before_the_kill_counts(tmp_path: Path) -> None:
    running = replace(RUNNING, began=time.time())
    assert job_states.ended_from_result(running, tmp_path) is None
    FINISHED.write(tmp_path)
    ended = job_states.ended_from_result(running, tmp_path)
    assert ended is not None
    assert (ended.state, ended.metric, ended.rule, ended.value, ended.step) == (
        "finished", "accuracy", "greater", 0.75, 40,
    )  # fmt: skip
    assert 0 <= ended.seconds < 60
    assert ended.checkpoint is None
    (tmp_path / "result.json").write_text('{"status": "fini')
    assert job_states.ended_from_result(running, tmp_path) is None


def test_the_iterations_are_those_of_the_newest_result(tmp_path: Path) -> None:
    for progress, iterations in (({"iteration": 40}, 40), ({}, 30)):
        replace(FINISHED, progress=progress).write(tmp_path)
        ended = job_states.ended_from_result(replace(RUNNING, iterations=30), tmp_path)
        assert ended is not None
        assert ended.iterations == iterations


def test_a_result_of_an_earlier_attempt_does_not_count(tmp_path: Path) -> None:
    replace(FINISHED, status="interrupted", reason="preempted by SIGTERM").write(tmp_path)
    again = replace(RUNNING, attempts=2, earlier_result=digest(tmp_path), seconds=100.0, attempt_times=((1.0, 101.0),))
    assert job_states.ended_from_result(again, tmp_path) is None
    replace(FINISHED, seconds=90.0, earlier_seconds=87.0).write(tmp_path)  # 13 s were lost by a kill
    ended = job_states.ended_from_result(again, tmp_path)
    assert ended is not None
    assert ended.state == "finished"
    assert ended.seconds == 103, "of all attempts"
    os.utime(tmp_path / "result.json", (1000.0, 1000.0))
    for began, start in ((999.0, 999.0), (1.0, 997.0)):  # the second one has waited in Slurm's queue
        ended = job_states.ended_from_result(replace(again, began=began), tmp_path)
        assert ended is not None
        assert ended.attempt_times == ((1.0, 101.0), (start, 1000.0))
    job_states.write(tmp_path, ended, flush=False)
    assert job_states.read(tmp_path) == ended


def test_a_job_that_pause_after_has_ended_is_paused(tmp_path: Path) -> None:
    for reason, state in (("engine.pause_after=2", "paused"), ("SIGTERM", "interrupted")):
        replace(FINISHED, status="interrupted", reason=f"preempted by {reason}").write(tmp_path)
        ended = job_states.ended_from_result(RUNNING, tmp_path)
        assert ended is not None
        assert (ended.state, ended.reason, ended.value) == (state, f"preempted by {reason}", 0.75)
        assert not ended.is_over


def test_the_checkpoint_is_that_of_the_best_validation(tmp_path: Path) -> None:
    """The value and the weights in `job.json` must come from the same validation."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "epoch_2.pth").write_text("")
    replace(FINISHED, best=Best("accuracy", 0.75, 40)).write(tmp_path)
    ended = job_states.ended_from_result(RUNNING, tmp_path)
    assert ended is not None
    assert ended.checkpoint is None
    best = Best("accuracy", 0.9, 20, str(tmp_path / "checkpoints" / "best.pth"))
    replace(FINISHED, best=best, objective=Objective("accuracy", "greater", 0.9, 20)).write(tmp_path)
    ended = job_states.ended_from_result(RUNNING, tmp_path)
    assert ended is not None
    assert (ended.value, ended.step, ended.checkpoint) == (0.9, 20, "checkpoints/best.pth")


def test_a_job_may_have_no_objective(tmp_path: Path) -> None:
    replace(FINISHED, status="failed", error="ValueError: x", objective=None).write(tmp_path)
    ended = job_states.ended_from_result(RUNNING, tmp_path)
    assert ended is not None
    assert (ended.state, ended.error, ended.metric, ended.value) == ("failed", "ValueError: x", None, None)
