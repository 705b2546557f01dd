"""The end of a job's process, which is written once. Claims of real processes: see `jobs`."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from hydraloop.run_files.lock import RunLock, holder
from hydraloop.run_files.result import Objective, Result
from hydraloop.sweeps import queue, states
from hydraloop.sweeps.executors.executor import LEFT, NOT_RECORDED, Request
from hydraloop.sweeps.states import State
from hydraloop.sweeps.sweep_directory import SweepDirectory
from tests.sweeps.test_directory import running, sweep

__all__ = ["sweep"]  # a fixture


@pytest.mark.parametrize(
    ("code", "state", "text"),
    [
        (-signal.SIGKILL, "interrupted", "killed by SIGKILL (out of memory?)"),
        (-signal.SIGTERM, "interrupted", "killed by SIGTERM"),
        (-signal.SIGSEGV, "failed", "its process crashed (SIGSEGV); see job.log"),
        (0, "failed", "its process ended with exit code 0 and no result; see job.log"),
        (1, "failed", "its process ended with exit code 1 and no result; see job.log"),
        (NOT_RECORDED, "interrupted", "its state could not be written"),
        (75, "interrupted", "its state could not be written"),
        (128 + signal.SIGTERM, "interrupted", "killed by SIGTERM"),
        (None, "interrupted", "its process has ended without a result"),
    ],
)
def test_a_job_whose_process_was_killed(code: int | None, state: str, text: str, sweep: SweepDirectory) -> None:
    running(sweep, 0, seconds=5.0)
    ended = queue.end(sweep, 0, code, 1)
    assert ended == states.read(sweep.folder(0))
    assert (ended.state, ended.error or ended.reason, ended.attempts) == (state, text, 1)
    assert 14 < ended.seconds < 60
    assert queue.end(sweep, 0, code, 1) == ended
    assert holder(sweep.folder(0)) is None


def test_a_result_before_the_kill_counts(sweep: SweepDirectory) -> None:
    running(sweep, 0)
    Result("finished", objective=Objective("loss", "less", 0.5, 5)).write(sweep.folder(0))
    assert queue.end(sweep, 0, -signal.SIGKILL, 1).state == "finished"
    assert sweep.state(0).value == 0.5


def test_a_process_that_has_ended_before_its_first_state(sweep: SweepDirectory) -> None:
    for code in (LEFT, NOT_RECORDED):
        assert queue.end(sweep, 0, code, 1).state == "queued"
    sweep.folder(0).mkdir()
    (sweep.folder(0) / states.REQUEST).touch()
    for code, attempt, state in (
        (1, 1, "failed"),
        (-signal.SIGKILL, 2, "interrupted"),
        (-signal.SIGKILL, 2, "interrupted"),
        (128 + signal.SIGINT, 3, "interrupted"),
        (0, 4, "failed"),
        (None, 5, "interrupted"),
    ):
        ended = queue.end(sweep, 0, code, attempt)
        assert (ended.state, ended.attempts) == (state, attempt)
    assert not (sweep.folder(0) / states.REQUEST).exists()


def test_the_exit_code_of_another_process_does_not_count(sweep: SweepDirectory) -> None:
    """Another controller has started the job again, and was killed with it."""
    for number, (code, attempt, controller) in enumerate([(0, 1, sweep.controller), (LEFT, 2, "another")]):
        running(sweep, number, attempts=2, controller=controller)
        assert queue.end(sweep, number, code, attempt).state == "interrupted"
        assert sweep.state(number).reason == "its process has ended without a result"


@pytest.mark.parametrize("state", ["queued", "interrupted", "paused", "running", "finished", "failed"])
def test_a_job_that_does_not_run_and_is_not_over_can_be_pruned(state: State, sweep: SweepDirectory) -> None:
    if state != "queued":
        states.write(sweep.folder(0), replace(running(sweep, 0), state=state), flush=False)
    before = sweep.state(0)
    pruned = queue.prune(sweep, 0, "rung 1")
    assert pruned == sweep.state(0)
    if state in ("queued", "interrupted", "paused"):
        assert pruned == replace(before, state="pruned", reason="rung 1")
        assert pruned.is_over
        assert queue.end(sweep, 0, -signal.SIGKILL, before.attempts + 1) == pruned, "it stays pruned"
    else:
        assert pruned == before
    assert holder(sweep.folder(0)) is None


def test_a_job_that_another_process_has_claimed_is_not_pruned(sweep: SweepDirectory) -> None:
    sweep.folder(0).mkdir()
    with RunLock(sweep.folder(0), key="x"):
        assert queue.prune(sweep, 0, "rung 1") is None
    assert sweep.state(0).state == "queued"


@pytest.mark.parametrize("state", ["queued", "interrupted", "paused", "failed", "pruned", "finished", "stopped"])
def test_which_jobs_can_be_claimed(state: State, sweep: SweepDirectory) -> None:
    states.write(sweep.folder(0), replace(running(sweep, 0), state=state), flush=False)
    claimed = queue.claim(sweep, Request(0, (), str(sweep.folder(0)), 1, "c"))
    assert (claimed is None) == (state in ("pruned", "finished", "stopped"))


def test_a_job_that_another_process_runs_is_not_ended(sweep: SweepDirectory) -> None:
    state = running(sweep, 0)
    with RunLock(sweep.folder(0), key="x"):
        assert queue.end(sweep, 0, -signal.SIGKILL, 1) == state
    assert sweep.state(0) == state
