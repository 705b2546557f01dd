"""The end of a sweep, with jobs that are played: what trackers are told, and the last words."""

from __future__ import annotations

import csv
import logging
import signal
from dataclasses import replace

import pytest

from hydraloop.sweeps.executors.executor import Request
from hydraloop.sweeps.report.lines import print_end
from hydraloop.sweeps.sweep_directory import SweepDirectory
from tests.sweeps.test_controller import Make, Played, directory, fail, finish, make
from tests.sweeps.test_directory import DESCRIPTION, GRID

__all__ = ["directory", "make"]  # fixtures


def test_the_results_are_those_of_the_grid_that_another_controller_has_widened(
    directory: SweepDirectory, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    other = SweepDirectory(directory.path, DESCRIPTION)
    more = (("optimizer.lr=1e-3", "seed=3"), ("optimizer.lr=1e-2", "seed=3"))
    jobs = replace(GRID, listed=(*GRID.listed, *more))
    other.widen(replace(DESCRIPTION, jobs=jobs, overrides=("optimizer.lr=1e-3,1e-2", "seed=0,1,2,3")))

    def play(played: Played, request: Request) -> int:
        loop.signals.note(signal.SIGINT)
        return finish(played, request)

    caplog.set_level(logging.INFO)
    loop, _ = make(play, workers=1)
    loop.run()
    print_end(loop)
    with (directory.path / "results.csv").open() as table:
        rows = list(csv.DictReader(table))
    assert [row["status"] for row in rows] == ["finished", *["queued"] * 7]
    assert "Jobs that are not over: 7 of 8. Continue:\n" in caplog.text
    assert "seed=0,1,2,3" in caplog.text


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
        loop.signals.note(signal.SIGINT)
        played.write(request, "interrupted")
        return 130

    loop, _ = make(play, workers=1)
    loop.run()
    print_end(loop)
    assert not (directory.path / "results.csv").exists()
