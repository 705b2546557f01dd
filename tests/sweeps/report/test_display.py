"""The live table of a sweep whose files are written by hand."""

from __future__ import annotations

import io
import os
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from hydraloop.sweeps import sweep_display
from hydraloop.sweeps.sweep_directory import SweepDirectory
from hydraloop.sweeps.sweep_display import JobLines
from tests.sweeps.written import finished, sweep, write


@pytest.fixture
def directory(tmp_path: Path) -> SweepDirectory:
    """30 jobs: two have ended, one of them failed, and two run."""
    made = sweep(tmp_path / "sweep", "hooks=[],[red],:smile:", "seed=0,1,2,3,4,5,6,7,8,9")
    write(made, {0: finished(0.5), 1: {"state": "failed", "error": "x"}})
    write(made, {n: {"state": "running", "began": time.time() - 60} for n in (12, 20)})
    return made


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """The terminal, 100 x 10."""
    written = io.StringIO()
    console = Console(
        file=written, force_terminal=True, width=100, height=10, markup=False, emoji=False, highlight=False
    )
    monkeypatch.setattr(sweep_display, "new_console", lambda: console)
    monkeypatch.setenv("TERM", "xterm")
    return written


def shown(terminal: io.StringIO) -> str:
    """Return what was written since the last call."""
    text = terminal.getvalue()
    terminal.seek(0)
    terminal.truncate()
    return text


def test_the_table_has_the_running_jobs_and_the_state_of_the_sweep(
    directory: SweepDirectory,
    terminal: io.StringIO,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sweep_display, "_PERIOD", 0.0)
    with sweep_display.watching(JobLines(directory)) as watcher:
        watcher.update()
        text = shown(terminal)
        assert "12   [red]" in text
        assert "20   :smile:" in text
        assert "starts" in text
        assert "30 jobs: 26 queued, 2 running, 1 finished, 1 failed; 0:00:00" in text
        assert "best without averages: job 0, accuracy 0.5000 (hooks=[] seed=0)" in text
        write(directory, {12: finished(0.75), 20: {"state": "failed", "error": "x"}})
        watcher.ended(directory.state(12))
        watcher.ended(directory.state(20))
        print("above the table")
        watcher.update()
        text = shown(terminal)
        assert "above the table" in text
        assert "26 queued, 2 finished, 2 failed" in text
        assert "[red] seed=2" in text
    assert [message.splitlines()[0] for message in caplog.messages] == ["job 20 (hooks=:smile: seed=0): x"]


def test_many_jobs_do_not_fill_the_screen(directory: SweepDirectory, terminal: io.StringIO) -> None:
    write(directory, {n: {"state": "running", "began": time.time()} for n in range(2, 30)})
    with sweep_display.watching(JobLines(directory)) as watcher:
        shown(terminal)
        watcher.update()
        text = shown(terminal)
    assert text.count("\n") < 10
    assert "28 running" in text


def test_without_a_terminal_a_line_tells_each_start_and_end(
    directory: SweepDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    write(directory, {20: {"state": "queued"}})
    with sweep_display.watching(JobLines(directory)) as watcher:
        watcher.started(directory.state(2))
        write(directory, {2: finished(0.75, seconds=58.0)})
        watcher.ended(directory.state(2))
        for number in (3, 4):
            write(directory, {number: {"state": "failed", "error": "x"}})
            watcher.ended(directory.state(number))
        watcher.update()
    start, end, first, second = caplog.messages
    assert first.startswith("job 3 (hooks=[] seed=3): x\n")
    assert second.startswith("job 4 (hooks=[] seed=4): the same error as before\n")
    assert start == "job 2 (hooks=[] seed=2) started"
    assert end.startswith("job 2 (hooks=[] seed=2) finished: accuracy 0.75 (58 s; about 0:")


def test_a_terminal_that_was_closed_is_not_an_error(directory: SweepDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    controller, terminal = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(terminal, "w") as file:
        console, before = Console(file=file, width=100, height=10), sys.stdout
        monkeypatch.setattr(sweep_display, "new_console", lambda: console)
        with sweep_display.watching(JobLines(directory)) as watcher:
            os.read(controller, 10)
            os.close(controller)
            watcher.update()
            watcher.ended(directory.state(0))
    assert sys.stdout is before
