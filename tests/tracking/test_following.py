"""The sender as a process, for a run and for the jobs of a sweep, as the hook and the controller start it."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import hydraloop
from hydraloop.files.lock import RunLock
from hydraloop.files.metrics_log import FILENAME
from hydraloop.files.metrics_writer import cut_after
from hydraloop.files.result import Result, digest
from hydraloop.files.run_directory import SWEEP_FILE
from hydraloop.safety.allowlist import ALLOWLIST
from hydraloop.tracking import run_description
from hydraloop.tracking.cursor import Cursor, lock_of, path_of
from hydraloop.tracking.start_sender import Sender, SweepSender, spawn
from tests.processes import children
from tests.tracking.mlflow.server import silent_server
from tests.tracking.runs import TENSORBOARD, attempt, described_run, log_records, track
from tests.tracking.service import Service
from tests.tracking.training import NAME, until

PATIENCE = 60.0
FINISH: dict[str, Any] = {"status": "finished", "error": None}
POSTING = "tests.tracking.service.Posting"


@pytest.fixture
def _trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trackers may be in the package `tests`."""
    monkeypatch.setattr(ALLOWLIST, "_trusted", {"tests"})


def tracked(run_dir: Path, kind: str = TENSORBOARD, records: int = 3, **options: Any) -> Path:
    """A run with a tracker and some records."""
    described_run(run_dir)
    track(run_dir, NAME, kind, {"flush_timeout": PATIENCE, **options})
    log_records(run_dir, records)
    return run_dir


def started(run_dir: Path) -> Sender:
    """The sender of a run."""
    made = Sender(run_dir, {NAME: {}})
    made.start()
    return made


def cursor_of(run_dir: Path) -> Cursor:
    found = Cursor.load(run_dir, NAME)
    return Cursor("") if found is None else found


def senders(folder: Path) -> list[psutil.Process]:
    """The senders that run."""
    found = [process for process, command in children().items() if str(folder) in command]
    return [process for process in found if process.status() != psutil.STATUS_ZOMBIE]


def process_of(folder: Path) -> psutil.Process:
    (found,) = senders(folder)
    return found


# A run. --------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_trusted")
def test_a_service_that_never_answers_is_reported_at_the_end(tmp_path: Path) -> None:
    with silent_server() as address:
        tracked(tmp_path, POSTING, flush_timeout=0.2, port=int(address.rpartition(":")[2]))
        hanging = started(tmp_path)
        until(lambda: path_of(tmp_path, NAME).exists())
        hanging.finish(0.2, **FINISH)
        hanging.wait(0.2)
    assert hanging.problem == "no answer within 0.2 s after the end"


def test_another_tracker_of_the_same_name_gets_all_records(tmp_path: Path) -> None:
    tracked(tmp_path, records=5)
    Cursor("wandb", index=3).save(tmp_path, NAME)
    sending = started(tmp_path)
    sending.finish(PATIENCE, **FINISH)
    sending.wait(PATIENCE)
    cursor = cursor_of(tmp_path)
    assert (cursor.kind, cursor.sent, cursor.complete) == (TENSORBOARD, 5, True)


@pytest.mark.parametrize(
    ("module", "content", "why"),
    [
        ("broken", "from hydraloop.tracking.tracker import Nothing", "ImportError: cannot import name 'Nothing'"),
        ("nothing", None, "ValueError: the tracker 'nothing.Mine' cannot be loaded"),
    ],
)
def test_what_cannot_be_imported_is_written_into_the_cursor(
    tmp_path: Path, module: str, content: str | None, why: str
) -> None:
    if content is not None:
        (tmp_path / f"{module}.py").write_text(content)
    run_dir = tracked(tmp_path / "run", f"{module}.Mine")
    sending = Sender(run_dir, {NAME: {}}, ([str(tmp_path)], []))
    sending.start()
    sending.finish(PATIENCE, **FINISH)
    sending.wait(PATIENCE)
    assert str(cursor_of(run_dir).trouble).startswith(why)


def test_hidden_options_reach_the_tracker_and_no_file(tmp_path: Path) -> None:
    run_dir = tracked(tmp_path / "run", POSTING, port=0, my_token="***")
    with Service().up() as service:
        sending = Sender(run_dir, {NAME: {"my_token": "plain1234"}}, ([], ["tests"]))
        track(run_dir, NAME, POSTING, {"flush_timeout": PATIENCE, "port": service.port, "my_token": "***"})
        sending.start()
        sending.finish(PATIENCE, **FINISH)
        sending.wait(PATIENCE)
    assert service.bodies("/records") == [[0, 1, 2]]
    assert not any("plain1234" in path.read_text() for path in (run_dir / "tracking").iterdir())


@pytest.mark.parametrize("held", [False, True])
def test_a_run_whose_owner_is_gone_is_closed_as_killed_if_nobody_has_its_lock(tmp_path: Path, held: bool) -> None:
    run_dir = tracked(tmp_path / "run", flush_timeout=1.0)
    lock = RunLock(run_dir, key="test")
    if held:
        lock.acquire()
    owner = os.fork()
    if owner == 0:
        try:
            started(run_dir)
            until(lambda: cursor_of(run_dir).sent == 3)
        finally:
            os._exit(0)
    os.waitpid(owner, 0)
    assert cursor_of(run_dir).sent == 3
    with lock_of(run_dir, NAME).acquire(timeout=PATIENCE):  # it has ended
        assert cursor_of(run_dir).complete == (not held)
    lock.release()


def test_an_owner_that_ends_while_its_sender_starts_is_noticed(tmp_path: Path) -> None:
    tracked(tmp_path, flush_timeout=0.5)
    sending = Sender(tmp_path, {NAME: {}})
    sending._first["owner"] = 2**22 + 1  # no process has this id
    sending.start()
    until(lambda: not sending.is_alive)
    sending.wait(0.0)
    assert cursor_of(tmp_path).sent == 3


def test_two_senders_of_a_run_exclude_each_other(tmp_path: Path) -> None:
    tracked(tmp_path)
    with lock_of(tmp_path, NAME):  # as the sender of an earlier process has it
        sending = started(tmp_path)
        time.sleep(2.0)
        assert cursor_of(tmp_path).sent == 0
    sending.finish(PATIENCE, **FINISH)
    sending.wait(PATIENCE)
    assert (cursor_of(tmp_path).sent, cursor_of(tmp_path).complete) == (3, True)


def test_a_sender_that_dies_is_started_again_three_times_and_that_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracked(tmp_path)
    sending = started(tmp_path)
    for _ in range(4):
        process_of(tmp_path).kill()
        until(lambda: not senders(tmp_path))
        with caplog.at_level(logging.WARNING, "hydraloop"):  # a killed process is seen before it can be waited for
            until(lambda: sending.check() or senders(tmp_path) or sending.problem)
    assert caplog.messages == ["the sender of the records was killed by SIGKILL, and is started again"]
    assert str(sending.problem).startswith("the sender of the records was killed by SIGKILL again and is given up")
    sending.wait(0.0)


def test_an_unreadable_cursor_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    described_run(tmp_path)
    for content in ("", "{", "[]", '{"kind": "mlflow", "other": 1}'):
        path_of(tmp_path, NAME).write_text(content)
        with caplog.at_level("WARNING", "hydraloop"):
            assert Cursor.load(tmp_path, NAME) is None
    assert len(caplog.records) == 4


def test_a_sender_finds_the_hydraloop_that_starts_it(tmp_path: Path) -> None:
    """Also if hydraloop is not installed, and the working directory is elsewhere: it gets the folder in PYTHONPATH."""
    folder = Path(hydraloop.__file__).parents[1]
    with (tmp_path / "out").open("wb") as out, spawn("site", output=out) as process:
        assert process.wait(PATIENCE) == 0
    assert (tmp_path / "out").read_text().startswith(f"sys.path = [\n    '{folder}',\n")


_WRITES = """
import logging, sys, threading, traceback
from hydraloop.files.secrets import remember
from hydraloop.files.console import log_to_stderr

secret = "kQ81sdf" + "7Zp02"
remember({"password": secret})
log_to_stderr()
log_to_stderr()
logging.getLogger("ours").info("logged %s", secret)
theirs = logging.getLogger("theirs")
theirs.addHandler(logging.StreamHandler())
theirs.propagate = False
theirs.warning("by a handler of theirs %s", secret)
print("printed", secret, flush=True)
sys.stdout.writelines(["lines ", secret])

def fail():
    raise ValueError("raised " + secret)

thread = threading.Thread(target=fail)
thread.start()
thread.join()
fail()
"""


def test_whatever_a_process_writes_is_masked() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WRITES], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert "kQ81sdf7Zp02" not in done.stdout + done.stderr
    assert done.stdout == "printed ***\nlines ***"
    assert done.stderr.count("][ours][INFO] logged ***\n") == 1
    assert "by a handler of theirs ***\n" in done.stderr
    assert done.stderr.count("ValueError: raised ***") == 2
    assert done.returncode == 1


@pytest.mark.slow
def test_kinds_and_their_libraries() -> None:
    check = """
import os, sys
from hydraloop.tracking.tracker import MLFLOW, TENSORBOARD, WANDB, load_tracker

for kind in (WANDB, TENSORBOARD, MLFLOW):
    found = load_tracker(kind)
    assert f"{found.__module__}.{found.__qualname__}" == kind
    library = kind.split(".")[2]
    found.preload()
    assert library in sys.modules
assert os.environ["WANDB_ERROR_REPORTING"] == "false"
"""
    subprocess.run([sys.executable, "-c", check], timeout=PATIENCE, check=True)


# A sweep. ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def sweep(tmp_path: Path) -> Iterator[SweepSender]:
    """The sender of a sweep that has begun in `tmp_path`."""
    (tmp_path / SWEEP_FILE).touch()
    made = SweepSender(tmp_path)
    yield made
    made.end()
    assert not senders(tmp_path)


def train(sweep: SweepSender, run_dir: Path, kind: str = TENSORBOARD, **options: Any) -> RunLock:
    """Let a job begin, with a tracker and three records."""
    lock = RunLock(run_dir, key="test").acquire()
    sweep.job_begins(run_dir)
    tracked(run_dir, kind, **options)
    sweep.check()
    return lock


def finish(sweep: SweepSender, run_dir: Path, lock: RunLock, status: Any = "finished") -> None:
    """Let a job end; None: without a result."""
    if status is not None:
        Result(status, records=3).write(run_dir)
    lock.release()
    sweep.job_ends(run_dir)


def test_a_sweep_without_trackers_starts_no_process(tmp_path: Path, sweep: SweepSender) -> None:
    sweep.job_begins(tmp_path / "0")
    sweep.check()
    sweep.job_ends(tmp_path / "0")
    assert not senders(tmp_path)


def test_one_process_sends_all_jobs(tmp_path: Path, sweep: SweepSender) -> None:
    """Also one that was killed, and one that has ended before the process was started."""
    locks = [train(sweep, tmp_path / "0"), train(sweep, tmp_path / "1"), train(sweep, tmp_path / "2")]
    finish(sweep, tmp_path / "0", locks[0])
    finish(sweep, tmp_path / "1", locks[1], None)
    until(lambda: all(cursor_of(tmp_path / name).complete for name in "01"))
    assert len(senders(tmp_path)) == 1
    assert not cursor_of(tmp_path / "2").complete
    finish(sweep, tmp_path / "2", locks[2], "failed")
    sweep.end()
    assert [cursor_of(tmp_path / name).sent for name in "012"] == [3, 3, 3]
    assert cursor_of(tmp_path / "2").complete


def test_a_job_that_is_resumed_does_not_wait_for_its_sender(tmp_path: Path, sweep: SweepSender) -> None:
    """A resume cuts the log while the sender follows it, and after it has sent all."""
    run_dir = tmp_path / "0"
    finish(sweep, run_dir, train(sweep, run_dir))
    until(lambda: cursor_of(run_dir).complete)
    lock = RunLock(run_dir, key="test").acquire()
    sweep.job_begins(run_dir)
    cut_after(run_dir / FILENAME, iteration=10, last_validation=0)
    run = run_description.read(run_dir)
    assert run is not None
    later = replace(attempt(1, 10), earlier_result=digest(run_dir), trackers=run.trackers)
    run_description.write(replace(run, attempts=(*run.attempts, later)))
    until(lambda: cursor_of(run_dir).attempt == 1)
    assert not cursor_of(run_dir).complete
    log_records(run_dir, 4, first=1)
    until(lambda: cursor_of(run_dir).sent == 5)
    cut_after(run_dir / FILENAME, iteration=30, last_validation=0)
    last = replace(attempt(2, 30), earlier_result=digest(run_dir), trackers=run.trackers)
    run_description.write(replace(run, attempts=(*run.attempts, later, last)))
    log_records(run_dir, 1, first=3)
    until(lambda: cursor_of(run_dir).attempt == 2 and cursor_of(run_dir).sent == 4)
    Result("finished", records=4).write(run_dir)
    lock.release()
    sweep.job_ends(run_dir)
    until(lambda: cursor_of(run_dir).complete)


@pytest.mark.parametrize("has_job", [True, False])
def test_the_next_controller_sends_what_was_left(tmp_path: Path, has_job: bool) -> None:
    """Until `flush_timeout` after its end, and also if all jobs have ended before it begins."""
    for name in "123":
        tracked(tmp_path / name)
        Result("finished", records=3).write(tmp_path / name)
    (tmp_path / SWEEP_FILE).touch()
    sweep = SweepSender(tmp_path)
    if has_job:
        finish(sweep, tmp_path / "4", train(sweep, tmp_path / "4"))
    sweep.end()
    assert all(cursor_of(tmp_path / name).complete for name in "123")
    assert cursor_of(tmp_path / "4").complete == has_job


def test_the_next_controller_waits_for_the_sender_of_one_that_was_killed(tmp_path: Path, sweep: SweepSender) -> None:
    """That sender may be killed too, before it has sent everything."""
    tracked(tmp_path / "1")
    Result("finished", records=3).write(tmp_path / "1")
    with lock_of(tmp_path / "1", NAME):
        finish(sweep, tmp_path / "2", train(sweep, tmp_path / "2"))
        until(lambda: cursor_of(tmp_path / "2").complete)
    sweep.end()
    assert cursor_of(tmp_path / "1").complete


@pytest.mark.usefixtures("_trusted")
def test_a_call_that_hangs_for_one_job_delays_no_other_and_the_end_names_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / SWEEP_FILE).touch()
    sweep = SweepSender(tmp_path)
    with Service().up() as service:
        options: dict[str, Any] = {"silent": "3", "flush_timeout": 3.0, "port": service.port}
        locks = [train(sweep, tmp_path / str(n), "tests.tracking.service.SilentForOne", **options) for n in range(6)]
        for number, lock in enumerate(locks):
            finish(sweep, tmp_path / str(number), lock)
        until(lambda: all(cursor_of(tmp_path / name).complete for name in "01245"))
        with caplog.at_level(logging.WARNING, "hydraloop"):
            sweep.end()
    assert caplog.messages == [f"{NAME}: not everything is sent in 3; python train.py sync {tmp_path} sends the rest"]
    assert not senders(tmp_path)


def test_a_sender_that_is_killed_is_started_again_and_follows_its_jobs(
    tmp_path: Path, sweep: SweepSender, caplog: pytest.LogCaptureFixture
) -> None:
    locks = [train(sweep, tmp_path / str(number)) for number in range(2)]
    until(lambda: all(cursor_of(tmp_path / name).sent == 3 for name in "01"))
    process_of(tmp_path).send_signal(signal.SIGKILL)
    until(lambda: not senders(tmp_path))
    for number, lock in enumerate(locks):
        log_records(tmp_path / str(number), 1, first=3)
        finish(sweep, tmp_path / str(number), lock)

    def are_complete() -> bool:
        sweep.check()  # as often as a controller does: a process is a zombie before its exit code can be read
        return all(cursor_of(tmp_path / name).complete for name in "01")

    with caplog.at_level(logging.WARNING, "hydraloop"):
        until(are_complete)
    assert [cursor_of(tmp_path / name).sent for name in "01"] == [4, 4]
    assert caplog.messages == ["the sender of the records was killed by SIGKILL, and is started again"]


def test_a_sender_that_is_found_dead_at_the_end_sends_the_rest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sweep = SweepSender(tmp_path)
    (tmp_path / SWEEP_FILE).touch()
    lock = train(sweep, tmp_path / "0")
    until(lambda: cursor_of(tmp_path / "0").sent == 3)
    process = process_of(tmp_path)
    process.suspend()
    log_records(tmp_path / "0", 1, first=3)
    finish(sweep, tmp_path / "0", lock)
    process.kill()
    with caplog.at_level(logging.WARNING, "hydraloop"):
        sweep.end()
    assert (cursor_of(tmp_path / "0").sent, cursor_of(tmp_path / "0").complete) == (4, True)
    assert caplog.messages == ["the sender of the records was killed by SIGKILL, and is started again"]


def test_a_full_pipe_holds_up_no_controller(tmp_path: Path) -> None:
    tracked(tmp_path)
    stopped = started(tmp_path)
    until(lambda: cursor_of(tmp_path).sent == 3)
    process_of(tmp_path).suspend()
    told = threading.Thread(target=lambda: [stopped.job_begins(tmp_path / str(n)) for n in range(3000)])
    told.start()
    told.join(20.0)
    assert not told.is_alive()
    stopped.kill()
