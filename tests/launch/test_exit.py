"""The code with which a process exits."""

from __future__ import annotations

import signal

import pytest

from hydraloop.errors import Terminated, UserError
from hydraloop.launch.exit import Preempted, exit_code


def test_the_exit_code_says_how_the_process_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script of a job in Slurm repeats it after 75 only: before training has begun, nothing was saved."""
    errors = [None, Preempted("SIGTERM"), Preempted("SIGINT"), Terminated(signal.SIGTERM), KeyboardInterrupt()]
    assert [exit_code(error) for error in errors] == [0, 75, 130, 143, 130]
    assert [exit_code(error, of_run=False) for error in (UserError("x"), RuntimeError())] == [2, 1]
    assert exit_code(UserError("x")) == 1
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert exit_code(Preempted("SIGTERM")) == 0, "the launcher would restart the ranks"
