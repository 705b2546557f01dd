"""The end of a sweep, with jobs that are played: what trackers are told, and the last words."""

from __future__ import annotations

import logging
import signal

import pytest

from hydraloop.sweeps.executors.executor import Request
from hydraloop.sweeps.sweep_directory import SweepDirectory
from hydraloop.sweeps.sweep_display import print_end
from tests.sweeps.test_controller import Make, Played, directory, fail, finish, make, write

__all__ = ["directory", "make"]  # fixtures


def test_the_last_line_counts_interrupted_jobs_apart(
    directory: SweepDirectory, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    def play(played: Played, request: Request) -> int:
        if request.number == 2:
            return -signal.SIGKILL
        return (fail if request.number in (0, 3) else finish)(played, request)

    loop, _ = make(play)
    loop.run()
    caplog.set_level(logging.INFO)
    print_end(loop)
    assert caplog.messages[-1].startswith("2 of 6 jobs failed, 1 interrupted: job 0 "), caplog.text


def test_without_any_result_there_is_no_table(directory: SweepDirectory, make: Make) -> None:
    def play(played: Played, request: Request) -> int:
        loop.signals.receive(signal.SIGINT)
        write(request, "interrupted")
        return 130

    loop, _ = make(play, workers=1)
    loop.run()
    print_end(loop)
    assert not (directory.path / "results.csv").exists()
