"""The trackers of a sweep: no job waits for its follower, the end of the sweep does, and says what is missing."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from hydraloop.engine.engine import Engine
from hydraloop.tracking import description, link, spawning, sweeps
from hydraloop.tracking.cursor import Cursor, lock_of, sign, wait_for_followers
from hydraloop.tracking.sweeps import SweepTrackers
from tests.helpers import at
from tests.processes import command_line
from tests.tracking.runs import TENSORBOARD, described_run, log_records
from tests.tracking.training import NAME, training, until


def job(folder: Path, number: int, *, complete: bool, **options: Any) -> Path:
    """The directory of a job that another process has trained."""
    run_dir = folder / str(number)
    described_run(run_dir)
    log_records(run_dir, 3)
    cursor = Cursor(TENSORBOARD, {"flush_timeout": 0.3, **options}, index=3 if complete else 1, complete=complete)
    cursor.save(run_dir, NAME)
    return run_dir


def test_the_mark_says_how_the_sweep_ended(tmp_path: Path) -> None:
    trackers = SweepTrackers(axes=["optimizer.lr"], jobs=2)
    trackers.begin(tmp_path)
    sweep = description.read_sweep(tmp_path)
    assert sweep is not None
    assert (sweep.jobs, sweep.axes, sweep.ended) == (2, ("optimizer.lr",), None)
    trackers.ended = "interrupted"
    trackers.end(tmp_path)
    sweep = description.read_sweep(tmp_path)
    assert sweep is not None
    assert sweep.ended == "interrupted"


def test_a_resumed_sweep_keeps_its_parent_run(tmp_path: Path) -> None:
    first = SweepTrackers(jobs=9)
    first.begin(tmp_path)
    before = description.read_sweep(tmp_path)
    first.ended = "interrupted"
    first.end(tmp_path)
    assert before is not None
    second = SweepTrackers(axes=["seed"], jobs=16)
    second.begin(tmp_path)
    assert description.read_sweep(tmp_path) == replace(before, axes=("seed",), jobs=16)
    second.ended = None  # a third one continues
    second.end(tmp_path)
    sweep = description.read_sweep(tmp_path)
    assert sweep is not None
    assert sweep.ended is None


_POOL = """
import os, sys
from pathlib import Path
import psutil
from hydraloop.tracking import link
from hydraloop.tracking.sweeps import SweepTrackers, share_followers
from tests.tracking.training import training

folder = Path(sys.argv[1])
trackers = SweepTrackers(jobs=2)
trackers.begin(folder)
server = os.fork()
if server == 0:
    share_followers(folder, ["seed=1", "hooks=[ema,tensorboard]"])
    for number in range(2):
        job = os.fork()
        if job == 0:
            os.setsid()
            training(folder / str(number), flush_timeout=80.0).train()
            assert link.SENDING and not psutil.Process().children()
            os._exit(0)
        assert os.waitpid(job, 0)[1] == 0
    os._exit(0)
assert os.waitpid(server, 0)[1] == 0
trackers.end(folder)
"""


@pytest.mark.slow
def test_followers_of_forked_jobs_are_forks_of_one_process(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", _POOL, str(tmp_path)], check=True, env=environment)
    cursors = [Cursor.load(tmp_path / str(number), NAME) for number in range(2)]
    assert [cursor is not None and (cursor.sent, cursor.complete) for cursor in cursors] == [(13, True)] * 2


@pytest.mark.parametrize(("background", "waits"), [(False, True), (True, False)])
def test_the_end_names_the_runs_that_are_not_complete(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, background: bool, waits: bool
) -> None:
    trackers = SweepTrackers(jobs=9)
    trackers.begin(tmp_path)
    for number in range(9):
        job(tmp_path, number, complete=number in (0, 5), background=background)
    start = time.monotonic()
    with caplog.at_level(logging.WARNING, "hydraloop"):
        trackers.end(tmp_path)
    assert (time.monotonic() - start > 0.3) == waits
    assert time.monotonic() - start < 5.0
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith(
        f"{NAME}: not everything is sent in 1, 2, 3, 4, 6 and 2 others; python -m hydraloop sync "
    )
    assert warning.endswith(f" {tmp_path} sends the rest")


def test_the_end_waits_for_the_follower_of_a_continued_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trackers = SweepTrackers(jobs=1)
    trackers.begin(tmp_path)
    run_dir = job(tmp_path, 0, complete=False)
    options = {"flush_timeout": 5.0}
    Cursor(TENSORBOARD, options, index=1, complete=True).save(run_dir, NAME)  # of the first attempt
    with lock_of(run_dir, NAME):
        sign(run_dir, NAME, (os.getpid(), None))
    wait_for_followers(run_dir)  # as the continued job does; its own follower is still starting
    sent = Cursor(TENSORBOARD, options, index=3, complete=True)
    timer = threading.Timer(0.3, sent.save, (run_dir, NAME))
    timer.start()
    with caplog.at_level(logging.WARNING, "hydraloop"):
        trackers.end(tmp_path)
    timer.join()
    assert caplog.messages == []


def test_no_job_waits_and_the_end_does(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trackers = SweepTrackers(jobs=2)
    trackers.begin(tmp_path)
    (tmp_path / "0" / "tracking").mkdir(parents=True)
    with lock_of(tmp_path / "0", NAME), caplog.at_level(logging.WARNING, "hydraloop"):  # this follower has to wait
        for number in range(2):
            start = time.monotonic()
            engine = training(tmp_path / str(number), flush_timeout=80.0)
            engine.train()
            assert time.monotonic() - start < 40.0
        told = engine.messages.read("tracked")[NAME]
        assert "the rest is being sent, for up to 80 s" in told or told.startswith("13 of 13 records sent, ")
        server = _fork_server()
        until(lambda: len(server.children()) == 2)  # both are forks of one process
    trackers.end(tmp_path)
    for number in range(2):
        cursor = Cursor.load(tmp_path / str(number), NAME)
        assert cursor is not None
        assert (cursor.sent, cursor.complete) == (13, True)
    assert caplog.records == []
    until(lambda: not psutil.pid_exists(server.pid))


def test_the_end_does_not_wait_for_a_follower_that_was_killed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trackers = SweepTrackers(jobs=1)
    trackers.begin(tmp_path)
    described_run(tmp_path / "0")
    follower = link.Link(tmp_path / "0", NAME, TENSORBOARD, {"flush_timeout": 80.0})
    follower.start()
    follower.begin()
    assert follower.until_opened(80.0)
    follower.stop()
    until(lambda: not follower.is_alive())
    start = time.monotonic()
    with caplog.at_level(logging.WARNING, "hydraloop"):
        trackers.end(tmp_path)
    assert time.monotonic() - start < 20.0
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith(f"{NAME}: not everything is sent in 0; ")


def _fork_server() -> psutil.Process:
    module = "hydraloop.tracking.process"
    (server,) = [one for one in psutil.Process().children() if module in command_line(one)]
    return server


def _stopped_fork() -> psutil.Process:
    """Stop the only follower that was forked, as SIGSTOP does."""
    (follower,) = _fork_server().children()
    follower.suspend()
    return follower


def _is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow  # some seconds, of a rare case
def test_a_forked_follower_that_hangs_is_killed_at_the_end(tmp_path: Path) -> None:
    trackers = SweepTrackers(jobs=1)
    trackers.begin(tmp_path)
    hung: list[psutil.Process] = []

    def hang(engine: Engine) -> None:
        until(lambda: (cursor := Cursor.load(tmp_path / "0", NAME)) is not None and cursor.attempt == 0)
        hung.append(_stopped_fork())

    training(tmp_path / "0", flush_timeout=1.0, more={"hang": at("after_train_iter", hang, nth=3)}).train()
    start = time.monotonic()
    trackers.end(tmp_path)
    assert time.monotonic() - start < 20.0
    until(lambda: _is_gone(hung[0]), 20.0)


def test_a_forked_follower_can_be_killed(tmp_path: Path) -> None:
    described_run(tmp_path)
    follower = link.Link(tmp_path, NAME, TENSORBOARD, {"flush_timeout": 80.0}, forked=True)
    follower.start()
    follower.begin()
    assert follower.until_opened(80.0)
    process = _stopped_fork()
    follower.stop()
    until(lambda: not follower.is_alive() and _is_gone(process), 20.0)
    spawning.close_fork_servers()


_FAILS = """
import resource, sys
from pathlib import Path
from hydraloop.tracking.sweeps import SweepTrackers

trackers = SweepTrackers(jobs=1)
trackers.begin(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # no file can be written, as on a full disk
try:
    sys.exit("the job's error")
finally:
    trackers.end(Path(sys.argv[1]))
"""


def test_a_full_disk_at_the_end_does_not_replace_the_sweeps_result(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FAILS, str(tmp_path)], capture_output=True, text=True, timeout=80, check=False
    )
    warning, error = done.stderr.splitlines()
    assert warning.startswith("the end of the sweep is not recorded for trackers: [Errno ")
    assert error == "the job's error"


_BEGINS = """
import sys
from pathlib import Path
from hydraloop.tracking.sweeps import SweepTrackers

SweepTrackers(jobs=2).begin(Path(sys.argv[1]))
"""


@pytest.mark.slow  # some seconds, of a rare case
@pytest.mark.parametrize("killed", [False, True])
def test_a_job_leaves_the_rest_to_its_own_controller_only(tmp_path: Path, killed: bool) -> None:
    """A job that is resumed after its sweep was killed waits for its follower."""
    if killed:
        subprocess.run([sys.executable, "-c", _BEGINS, str(tmp_path)], check=True)
    else:
        SweepTrackers(jobs=2).begin(tmp_path)
    (tmp_path / "0" / "tracking").mkdir(parents=True)
    with lock_of(tmp_path / "0", NAME):  # this follower cannot send
        engine = training(tmp_path / "0", flush_timeout=0.5)
        engine.train()
    told = engine.messages.read("tracked")[NAME]
    assert told.startswith("0 of 13 records sent")
    assert ("the rest is being sent" in told) == (not killed)
    assert bool(link.SENDING) == (not killed)
    SweepTrackers().end(tmp_path)


def test_a_process_with_threads_is_not_forked(tmp_path: Path) -> None:
    (tmp_path / "threads.py").write_text(
        "import threading, time\n"
        "from hydraloop.tracking.tensorboard import TensorBoardTracker\n"
        "class Mine(TensorBoardTracker): pass\n"
        "threading.Thread(target=time.sleep, args=[100], daemon=True).start()\n"
    )
    first = {"kind": "threads.Mine", "folders": [str(tmp_path)], "trusted": []}
    server = spawning.ForkServer(first, tmp_path / "errors.log")
    child = spawning.Child(tmp_path, NAME, tmp_path / "errors.log", server)
    assert list(child.messages()) == []
    assert child.ended() is None
    server.close()


_EXITS = """
import sys
from pathlib import Path
from hydraloop.tracking.link import Link
from hydraloop.tracking.tracker import Finish

link = Link(Path(sys.argv[1]), "tracker", sys.argv[2], {"flush_timeout": 80.0}, forked=sys.argv[3] == "True")
link.start()
link.begin()
link.finish(Finish("finished"))
link.leave()
"""


@pytest.mark.parametrize("forked", [False, True])
def test_a_process_that_exits_at_once_leaves_its_follower(tmp_path: Path, forked: bool) -> None:
    described_run(tmp_path)
    log_records(tmp_path, 3)
    subprocess.run([sys.executable, "-c", _EXITS, str(tmp_path), TENSORBOARD, str(forked)], check=True)
    until(lambda: (cursor := Cursor.load(tmp_path, NAME)) is not None and cursor.complete)


def test_a_parent_run_that_nobody_closed_is_closed_by_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(sweeps, "_sync", synced.append)
    monkeypatch.setattr(sweeps, "has_open_parent", lambda folder: True)
    trackers = SweepTrackers(jobs=2)
    trackers.begin(tmp_path)
    job(tmp_path, 0, complete=True)
    trackers.end(tmp_path)
    assert synced == [tmp_path]
    job(tmp_path, 1, complete=False)  # the user's sync closes it
    trackers.end(tmp_path)
    assert synced == [tmp_path]
