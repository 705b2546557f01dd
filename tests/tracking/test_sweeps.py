"""The trackers of a sweep: no job waits for its follower, the end of the sweep does, and says what is missing."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from hydraloop.engine.engine import Engine
from hydraloop.run_files.environment import shown
from hydraloop.safety.allowlist import ALLOWLIST
from hydraloop.tracking import link, run_description
from hydraloop.tracking.cursor import Cursor, lock_of, sign, wait_for_followers
from hydraloop.tracking.sweep_trackers import SweepTrackers
from hydraloop.tracking.tracker import Finish
from tests.helpers import at
from tests.tracking.mlflow.server import silent_server
from tests.tracking.runs import TENSORBOARD, described_run, log_records
from tests.tracking.service import Service
from tests.tracking.training import NAME, training, until

CONTINUES = "training continues, the records stay in the run directory"


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
    sweep = run_description.read_sweep(tmp_path)
    assert sweep is not None
    assert (sweep.jobs, sweep.axes, sweep.ended) == (2, ("optimizer.lr",), None)
    trackers.ended = "interrupted"
    trackers.end(tmp_path)
    sweep = run_description.read_sweep(tmp_path)
    assert sweep is not None
    assert sweep.ended == "interrupted"


def test_a_resumed_sweep_keeps_its_parent_run(tmp_path: Path) -> None:
    first = SweepTrackers(jobs=9)
    first.begin(tmp_path)
    before = run_description.read_sweep(tmp_path)
    first.ended = "interrupted"
    first.end(tmp_path)
    assert before is not None
    second = SweepTrackers(axes=["seed"], jobs=16)
    second.begin(tmp_path)
    assert run_description.read_sweep(tmp_path) == replace(before, axes=("seed",), jobs=16)
    second.ended = None  # a third one continues
    second.end(tmp_path)
    sweep = run_description.read_sweep(tmp_path)
    assert sweep is not None
    assert sweep.ended is None


@pytest.fixture
def sweep(tmp_path: Path) -> Iterator[SweepTrackers]:
    """The trackers of a sweep that has begun in `tmp_path`, whose jobs share senders."""
    trackers = SweepTrackers(jobs=2)
    trackers.share_senders()
    trackers.begin(tmp_path)
    yield trackers
    trackers.end(tmp_path)


def pid_of(run_dir: Path) -> int:
    """The id of the process that has sent a run last."""
    _, (pid, _), _ = json.loads((run_dir / "tracking" / f"{NAME}.pid").read_text())
    return int(pid)


def is_gone(process: psutil.Process) -> bool:
    """Whether a process has ended."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


_JOBS = """
import os, sys
from pathlib import Path
from hydraloop.tracking.sweep_trackers import SweepTrackers
from tests.tracking.training import training

folder = Path(sys.argv[1])
trackers = SweepTrackers(jobs=2)
trackers.share_senders()
trackers.begin(folder)
for number in range(2):
    job = os.fork()
    if job == 0:
        os.setsid()
        training(folder / str(number), flush_timeout=80.0).train()
        os._exit(0)
    assert os.waitpid(job, 0)[1] == 0
trackers.end(folder)
"""


@pytest.mark.slow
def test_jobs_share_a_sender_that_ends_with_neither_of_them(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", _JOBS, str(tmp_path)], check=True, env=environment)
    cursors = [Cursor.load(tmp_path / str(number), NAME) for number in range(2)]
    assert [cursor is not None and (cursor.sent, cursor.complete) for cursor in cursors] == [(13, True)] * 2
    pids = {(tmp_path / str(number) / "tracking" / f"{NAME}.pid").read_text() for number in range(2)}
    assert len(pids) == 1


def test_the_end_names_the_runs_that_are_not_complete(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trackers = SweepTrackers(jobs=9)
    trackers.begin(tmp_path)
    for number in range(9):
        job(tmp_path, number, complete=number in (0, 5))
    start = time.monotonic()
    with caplog.at_level(logging.WARNING, "hydraloop"):
        trackers.end(tmp_path)
    assert 0.3 < time.monotonic() - start < 5.0
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


def test_no_job_waits_and_the_end_does(tmp_path: Path, sweep: SweepTrackers, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "0" / "tracking").mkdir(parents=True)
    with lock_of(tmp_path / "0", NAME), caplog.at_level(logging.WARNING, "hydraloop"):  # this run has to wait
        for number in range(2):
            start = time.monotonic()
            engine = training(tmp_path / str(number), flush_timeout=80.0)
            engine.train()
            assert time.monotonic() - start < 40.0
        told = engine.messages.read("tracked")[NAME]
        assert "the rest is being sent, for up to 80 s" in told or told.startswith("13 of 13 records sent, ")
    sweep.end(tmp_path)
    for number in range(2):
        cursor = Cursor.load(tmp_path / str(number), NAME)
        assert cursor is not None
        assert (cursor.sent, cursor.complete) == (13, True)
    assert caplog.records == []
    assert pid_of(tmp_path / "0") == pid_of(tmp_path / "1")
    until(lambda: not psutil.pid_exists(pid_of(tmp_path / "0")))


def linked(run_dir: Path, sweep: bool = True, kind: str = TENSORBOARD, **options: Any) -> link.Link:
    """A link of a run with three records."""
    described_run(run_dir)
    log_records(run_dir, 3)
    found = run_description.read_sweep(run_dir.parent) if sweep else None
    made = link.Link(run_dir, NAME, kind, {"flush_timeout": 80.0, **options}, sweep=found, is_shared=sweep)
    made.start()
    made.begin()
    return made


def finished(links: Iterable[link.Link]) -> list[bool]:
    """Finish runs. Returns which are complete."""
    for one in links:
        one.finish(Finish("finished"))
    for one in links:
        one.wait()
    return [(cursor := Cursor.load(one.run_dir, NAME)) is not None and cursor.complete for one in links]


@pytest.fixture
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trackers may be in the package `tests`."""
    monkeypatch.setattr(ALLOWLIST, "_trusted", {"tests"})


@pytest.mark.usefixtures("sweep", "trusted")
def test_a_call_that_hangs_for_one_run_delays_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_IMPORT", 0.0)
    kind = "tests.tracking.service.SilentForOne"
    with Service().up() as service:
        options: dict[str, Any] = {"silent": "3", "flush_timeout": 15.0, "port": service.port}
        links = [linked(tmp_path / str(number), kind=kind, **options) for number in range(10)]
        links[3].finish(Finish("finished"))
        others = [one for one in links if one is not links[3]]
        assert finished(others) == [True] * 9
        assert links[3].is_alive()
        assert len({pid_of(one.run_dir) for one in links}) == 1
        links[3].wait()
    assert links[3].trouble == "no answer within 15 s after the run's end"


@pytest.mark.nightly  # starts ten processes
@pytest.mark.usefixtures("sweep", "trusted")
def test_one_of_ten_servers_is_silent(tmp_path: Path) -> None:
    """Runs with another server have another sender."""
    kind = "tests.tracking.service.Posting"
    with ExitStack() as stack:
        ports = [stack.enter_context(Service().up()).port for _ in range(9)]
        ports.insert(3, int(stack.enter_context(silent_server()).rpartition(":")[2]))
        links = [
            linked(tmp_path / str(number), kind=kind, port=port, flush_timeout=20.0)
            for number, port in enumerate(ports)
        ]
        for one in links:
            until(lambda: (one.run_dir / "tracking" / f"{NAME}.pid").exists())  # noqa: B023 - called at once
        assert len({pid_of(one.run_dir) for one in links}) == 10
        assert finished(links) == [number != 3 for number in range(10)]


@pytest.mark.usefixtures("sweep")
def test_a_sender_that_is_killed_is_replaced_for_all_its_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    links = [linked(tmp_path / str(number)) for number in range(3)]
    assert all(one.until_opened(80.0) for one in links)
    until(lambda: all(path.exists() for path in (one.run_dir / "tracking" / f"{NAME}.pid" for one in links)))
    sender = psutil.Process(pid_of(tmp_path / "0"))
    assert sender not in psutil.Process().children(recursive=True), "a job is killed with its descendants"
    with caplog.at_level(logging.WARNING, "hydraloop"):
        sender.kill()
        until(lambda: all(one.died is not None for one in links))
    log = tmp_path / "tracking" / f"{NAME}.log"
    assert caplog.messages == [f"{NAME}: its process has ended, see {shown(log)}, and is restarted; {CONTINUES}"] * 3
    assert finished(links) == [True] * 3
    pids = {pid_of(one.run_dir) for one in links}
    assert len(pids) == 1
    assert sender.pid not in pids


@pytest.mark.usefixtures("sweep")
def test_a_run_with_another_environment_has_another_sender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    links = [linked(tmp_path / "0")]
    assert links[0].until_opened(80.0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # not of interest to trackers
    links.append(linked(tmp_path / "1"))
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "another")
    links.append(linked(tmp_path / "2"))
    assert finished(links) == [True] * 3
    first, second, other = (pid_of(one.run_dir) for one in links)
    assert first == second != other


def test_the_end_does_not_wait_for_a_follower_that_was_killed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trackers = SweepTrackers(jobs=1)
    trackers.begin(tmp_path)
    own = linked(tmp_path / "0", sweep=False)
    assert own.until_opened(80.0)
    own.stop()
    until(lambda: not own.is_alive())
    Cursor(TENSORBOARD, {"flush_timeout": 80.0}).save(tmp_path / "0", NAME)
    start = time.monotonic()
    with caplog.at_level(logging.WARNING, "hydraloop"):
        trackers.end(tmp_path)
    assert time.monotonic() - start < 20.0
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith(f"{NAME}: not everything is sent in 0; ")


@pytest.mark.slow  # some seconds, of a rare case
def test_a_sender_that_hangs_is_killed_at_the_end(tmp_path: Path, sweep: SweepTrackers) -> None:
    hung: list[psutil.Process] = []

    def hang(engine: Engine) -> None:
        until(lambda: (cursor := Cursor.load(tmp_path / "0", NAME)) is not None and cursor.attempt == 0)
        hung.append(psutil.Process(pid_of(tmp_path / "0")))
        hung[0].suspend()

    training(tmp_path / "0", flush_timeout=1.0, more={"hang": at("after_train_iter", hang, nth=3)}).train()
    start = time.monotonic()
    sweep.end(tmp_path)
    assert time.monotonic() - start < 20.0
    until(lambda: is_gone(hung[0]), 20.0)


_FAILS = """
import resource, sys
from pathlib import Path
from hydraloop.tracking.sweep_trackers import SweepTrackers

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
from hydraloop.tracking.sweep_trackers import SweepTrackers

SweepTrackers(jobs=2).begin(Path(sys.argv[1]))
"""


@pytest.mark.slow  # some seconds, of a rare case
@pytest.mark.parametrize("killed", [False, True])
def test_a_job_leaves_the_rest_to_its_own_controller_only(tmp_path: Path, killed: bool) -> None:
    """A job that is resumed after its sweep was killed waits for its follower."""
    trackers = SweepTrackers(jobs=2)
    if killed:
        subprocess.run([sys.executable, "-c", _BEGINS, str(tmp_path)], check=True)
    else:
        trackers.share_senders()
        trackers.begin(tmp_path)
    (tmp_path / "0" / "tracking").mkdir(parents=True)
    with lock_of(tmp_path / "0", NAME):  # this follower cannot send
        engine = training(tmp_path / "0", flush_timeout=0.5)
        engine.train()
    told = engine.messages.read("tracked")[NAME]
    assert told.startswith("0 of 13 records sent")
    assert ("the rest is being sent" in told) == (not killed)
    trackers.end(tmp_path)


_EXITS = """
import sys
from pathlib import Path
from tests.tracking.test_sweeps import Finish, linked

link = linked(Path(sys.argv[1]), sys.argv[2] == "True")
link.finish(Finish("finished"))
link.leave()
"""


@pytest.mark.usefixtures("sweep")
@pytest.mark.parametrize("shared", [False, True])
def test_a_process_that_exits_at_once_leaves_its_sender(tmp_path: Path, shared: bool) -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", _EXITS, str(tmp_path / "0"), str(shared)], check=True)
    until(lambda: (cursor := Cursor.load(tmp_path / "0", NAME)) is not None and cursor.complete)
