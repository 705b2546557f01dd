"""The state of a job whose process was killed, or that a search does not need any more."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from hydraloop.sweeps import job_states
from hydraloop.sweeps.job_states import UNUSABLE, State
from hydraloop.sweeps.sweep_directory import SweepDirectory
from tests.sweeps.test_directory import running, sweep

__all__ = ["sweep"]  # a fixture


@pytest.mark.parametrize(
    ("code", "state", "text"),
    [
        (-signal.SIGKILL, "interrupted", "killed by SIGKILL (out of memory?)"),
        (-signal.SIGTERM, "interrupted", "killed by SIGTERM"),
        (-signal.SIGSEGV, "failed", "its process crashed (SIGSEGV); see job.log"),
        (-signal.SIGRTMAX + 1, "failed", f"its process crashed (signal {signal.SIGRTMAX - 1}); see job.log"),
        (0, "failed", "its process ended with exit code 0 and no result; see job.log"),
        (1, "failed", "its process ended with exit code 1 and no result; see job.log"),
        (UNUSABLE, "interrupted", "its directory could not be used; see job.log"),
        (75, "interrupted", "it was ended before it could begin"),
        (128 + signal.SIGTERM, "interrupted", "killed by SIGTERM"),
        (None, "interrupted", "its process has ended without a result"),
    ],
)
def test_a_job_whose_process_was_killed(code: int | None, state: str, text: str, sweep: SweepDirectory) -> None:
    job = running(sweep, 0, seconds=5.0)
    ended = job_states.ended_without_result(job, sweep.folder(0), sweep.run_dir(job), code)
    assert (ended.state, ended.error or ended.reason, ended.attempts) == (state, text, 1)
    assert 14 < ended.seconds < 60


@pytest.mark.parametrize("state", ["queued", "interrupted", "paused", "running", "finished", "failed"])
def test_a_job_that_does_not_run_and_is_not_over_can_be_pruned(state: State, sweep: SweepDirectory) -> None:
    before = replace(running(sweep, 0), state=state)
    pruned = job_states.pruned_if_open(before, "rung 1")
    if state in ("queued", "interrupted", "paused"):
        assert pruned == replace(before, state="pruned", reason="rung 1")
    else:
        assert pruned == before
