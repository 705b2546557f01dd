"""The process of a sender, with messages as the training process sends them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import hydraloop
from hydraloop.run_files.processes import machine, started
from hydraloop.run_files.record_log import FILENAME
from hydraloop.safety.allowlist import ALLOWLIST
from hydraloop.tracking import cursor as cursors
from hydraloop.tracking import link
from hydraloop.tracking.cursor import Cursor, path_of
from hydraloop.tracking.starting import HANGS, LEFT, spawn
from hydraloop.tracking.tracker import Finish
from tests.tracking.mlflow.server import silent_server
from tests.tracking.runs import TENSORBOARD, described_run, log_records
from tests.tracking.training import until

NAME = "mine"
PATIENCE = 60.0
FINISH = {"finish": {"status": "finished", "error": None, "exit_code": 0}}


def _first(run_dir: Path, **more: Any) -> dict[str, Any]:
    first = link.first_message(TENSORBOARD, {"flush_timeout": 30.0})
    return {**first, "run_dir": str(run_dir), "name": NAME, **more}


class Training:
    """A training process with a sender, as a context."""

    def __init__(self, run_dir: Path) -> None:
        self._connection, theirs = socket.socketpair()
        log = run_dir / "tracking" / f"{NAME}.log"
        log.parent.mkdir(exist_ok=True)
        with theirs, log.open("ab") as errors:
            pipes = (theirs.fileno(), errors.fileno(), errors.fileno())
            self.sender = spawn("hydraloop.tracking.sender", str(run_dir), NAME, pipes=pipes)
        self.lines = self._connection.makefile("rb")

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        self.lines.close()
        self._connection.close()
        self.sender.wait(PATIENCE)

    def tell(self, *messages: dict[str, Any]) -> None:
        """Send messages."""
        self._connection.sendall(b"".join(map(_line, messages)))

    def exit(self) -> None:
        """Close the sender's input, as the end of the process does."""
        self._connection.shutdown(socket.SHUT_WR)

    def heard(self) -> dict[str, Any]:
        """The next message of the sender."""
        return dict(json.loads(self.lines.readline()))


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _sent(run_dir: Path, *messages: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
    """Send all messages at once. Returns the exit code, and the sender's messages except for the last one."""
    with Training(run_dir) as training:
        training.tell(*messages)
        heard = [json.loads(line) for line in training.lines]
        code = training.sender.wait(PATIENCE)
    return code, [message for message in heard if message["kind"] != "ended"]


def test_one_that_hangs_ends_with_its_time(tmp_path: Path) -> None:
    """The training process exits while the sender hangs: it reads a pipe without a writer."""
    described_run(tmp_path)
    os.mkfifo(tmp_path / FILENAME)
    with Training(tmp_path) as training:
        training.tell(_first(tmp_path, flush_timeout=0.2), {"say": "begin"})
        training.exit()
        assert training.sender.wait(PATIENCE) == HANGS


def test_another_tracker_of_the_same_name_gets_all_records(tmp_path: Path) -> None:
    described_run(tmp_path)
    log_records(tmp_path, 5)
    (tmp_path / "tracking").mkdir(exist_ok=True)
    Cursor("wandb", {}, offset=10, index=3).save(tmp_path, NAME)
    code, said = _sent(tmp_path, _first(tmp_path), {"say": "begin"}, FINISH)
    assert code == 0
    assert [message["text"] for message in said if message["kind"] == "remark"] == [
        f"the tracker was wandb and is {TENSORBOARD} now: all records are sent again"
    ]
    cursor = Cursor.load(tmp_path, NAME)
    assert cursor is not None
    assert (cursor.kind, cursor.sent, cursor.finished) == (TENSORBOARD, 5, True)


@pytest.mark.parametrize(
    ("module", "content", "why"),
    [
        ("broken", "from hydraloop.tracking.tracker import Nothing", "ImportError: cannot import name 'Nothing'"),
        ("nothing", None, "ValueError: the tracker 'nothing.Mine' cannot be loaded"),
    ],
)
def test_what_cannot_be_imported_is_reported_before_the_run_begins(
    tmp_path: Path, module: str, content: str | None, why: str
) -> None:
    if content is not None:
        (tmp_path / f"{module}.py").write_text(content)
    with Training(tmp_path) as training:
        training.tell(_first(tmp_path, kind=f"{module}.Mine", folders=[str(tmp_path)]))
        said = training.heard()
        assert training.sender.wait(PATIENCE) == LEFT
    assert said["kind"] == "trouble"
    assert said["text"].startswith(why)


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


def test_no_secret_is_in_the_senders_own_file(tmp_path: Path) -> None:
    """The error names the run directory, which has a password as its name here."""
    run_dir = tmp_path / "kQ81sdf7Zp02"
    (run_dir / "tracking" / "run.json").mkdir(parents=True)
    options = {"password": run_dir.name, "flush_timeout": 30.0}
    code, _ = _sent(run_dir, _first(run_dir, options=options), {"say": "begin"}, FINISH)
    assert code == 1
    written = (run_dir / "tracking" / f"{NAME}.log").read_text()
    assert "IsADirectoryError" in written
    assert "/***/tracking/run.json" in written
    assert run_dir.name not in written


_WRITES = """
import logging, sys, threading, traceback
from hydraloop.safety.secrets import remember
from hydraloop.tracking.masked_output import log_to_stderr

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


_ORPHANS = """
import os, signal, sys
from pathlib import Path
from tests.tracking.follower import test_sender as test

run_dir = Path(sys.argv[1])
training = test.Training(run_dir)
training.tell(test._first(run_dir), {"say": "begin"})
training.heard()
training.sender.send_signal(signal.SIGSTOP)
print(training.sender.pid, flush=True)
os._exit(0)
"""


@pytest.mark.slow  # some seconds, of a rare case
def test_a_follower_waits_for_whoever_is_sending(tmp_path: Path) -> None:
    described_run(tmp_path)
    log_records(tmp_path, 2)
    with cursors.lock_of(tmp_path, NAME):  # as `sync.py` does
        code, (said,) = _sent(tmp_path, _first(tmp_path, flush_timeout=3.0), {"say": "begin"}, FINISH)
        assert (code, said["kind"]) == (HANGS, "remark")
        assert "`python -m hydraloop sync`" in said["text"]
        training = Training(tmp_path)
        training.tell(_first(tmp_path), {"say": "begin"}, FINISH)
    with training:
        assert training.sender.wait(PATIENCE) == 0
    cursor = Cursor.load(tmp_path, NAME)
    assert cursor is not None
    assert (cursor.sent, cursor.finished) == (2, True)


def test_an_unreadable_cursor_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    described_run(tmp_path)
    for content in ("", "{", "[]", '{"kind": "mlflow", "other": 1}'):
        path_of(tmp_path, NAME).write_text(content)
        with caplog.at_level("WARNING", "hydraloop"):
            assert Cursor.load(tmp_path, NAME) is None
    assert len(caplog.records) == 4


def test_a_cursor_that_cannot_be_saved_leaves_nothing(tmp_path: Path) -> None:
    path_of(tmp_path, NAME).mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        Cursor(TENSORBOARD, {}).save(tmp_path, NAME)
    assert [path.name for path in (tmp_path / "tracking").iterdir()] == [f"{NAME}.cursor.json"]


@pytest.mark.slow  # some seconds, of a rare case
def test_a_follower_that_was_left_and_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cursors, "PATIENCE", 0.5)
    described_run(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", _ORPHANS, str(tmp_path)], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    follower = psutil.Process(int(done.stdout))
    try:
        deadline = time.monotonic() + PATIENCE
        while follower.status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
            time.sleep(0.01)  # the signal was sent, and arrives soon
        assert follower.status() == psutil.STATUS_STOPPED
        cursors.wait_for_followers(tmp_path)
        assert not follower.is_running() or follower.status() == psutil.STATUS_ZOMBIE
    finally:
        if follower.is_running():
            follower.send_signal(signal.SIGKILL)


def test_a_process_of_another_machine_is_not_killed(tmp_path: Path) -> None:
    """On a shared file system, a process here may have the id of a follower there."""
    (tmp_path / "tracking").mkdir()
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        signed = [[process.pid, started(process.pid)], [0, None]]
        (tmp_path / "tracking" / f"{NAME}.pid").write_text(json.dumps(["another machine", *signed]))
        cursors.kill_hanging(tmp_path, NAME)
        assert process.poll() is None
        (tmp_path / "tracking" / f"{NAME}.pid").write_text(json.dumps([machine(), *signed]))
        cursors.kill_hanging(tmp_path, NAME)
        assert process.wait(PATIENCE) == -signal.SIGKILL


def test_a_service_that_accepts_and_never_answers_is_reported_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ALLOWLIST, "_trusted", {"tests"})
    described_run(tmp_path)
    with silent_server() as address, caplog.at_level("WARNING", "hydraloop"):
        options = {"flush_timeout": 0.2, "port": int(address.rpartition(":")[2])}
        hanging = link.Link(tmp_path, NAME, "tests.tracking.service.Posting", options)
        hanging.start()
        hanging.begin()
        until(lambda: (tmp_path / "tracking" / f"{NAME}.pid").exists())
        hanging.finish(Finish("finished"))
        hanging.wait()
    assert [record.getMessage() for record in caplog.records] == [f"{NAME}: no answer within 0.2 s after the run's end"]
    assert hanging.trouble == "no answer within 0.2 s after the run's end"


def test_a_follower_that_fails_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(link, "_PAUSES", ())
    (tmp_path / "tracking" / "run.json").mkdir(parents=True)
    failing = link.Link(tmp_path, NAME, TENSORBOARD, {"flush_timeout": 30.0})
    with caplog.at_level("WARNING", "hydraloop"):
        failing.start()
        failing.begin()
        assert not failing.until_opened(PATIENCE)
        until(lambda: not failing.is_alive())
    assert failing.trouble is not None
    assert failing.trouble.startswith("its process ended with exit code 1 (IsADirectoryError: [Errno 21]")
    assert [record.getMessage() for record in caplog.records] == [
        f"{NAME}: {failing.trouble}; training continues, the records stay in the run directory"
    ]


def test_a_follower_finds_the_hydraloop_that_starts_it(tmp_path: Path) -> None:
    """Also if hydraloop is not installed, and the working directory is elsewhere: it gets the folder in PYTHONPATH."""
    folder = Path(hydraloop.__file__).parents[1]
    with (tmp_path / "out").open("wb") as out:
        pipes = (subprocess.DEVNULL, out.fileno(), out.fileno())
        assert spawn("site", pipes=pipes).wait(PATIENCE) == 0
    assert (tmp_path / "out").read_text().startswith(f"sys.path = [\n    '{folder}',\n")
