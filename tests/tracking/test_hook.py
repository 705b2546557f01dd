"""A tracker hook and its follower as real processes, with TensorBoard, the fastest tracker."""

from __future__ import annotations

import logging
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.errors import UserError
from hydraloop.hooks import LoggerHook, TensorBoardLoggerHook
from hydraloop.run.record_log import FILENAME, count
from hydraloop.run.result import Result
from hydraloop.tracking import description, sync
from hydraloop.tracking.follower import link
from hydraloop.tracking.follower.cursor import Cursor
from hydraloop.tracking.follower.locks import lock_of
from hydraloop.tracking.hook import TrackerError, _ending
from hydraloop.tracking.tracker import Finish
from tests.helpers import at, batches, make_engine
from tests.processes import children

NAME = "tracker"


def _engine(
    run_dir: Path, *, epochs: int = 2, iterations: int = 5, more: dict[str, Hook] | None = None, **tracker: Any
) -> Engine:
    on_error = tracker.pop("on_error", "warn")
    run_dir.mkdir(parents=True, exist_ok=True)
    engine = make_engine(
        run_dir,
        {"logger": LoggerHook(interval=1), NAME: TensorBoardLoggerHook(**tracker), **(more or {})},
        train=batches(iterations),
        val=batches(1),
        test=batches(1),
        max_epochs=epochs,
    )
    engine.stages._policies[NAME].on_error = on_error
    return engine


def _cursor(run_dir: Path) -> Cursor:
    found = Cursor.load(run_dir, NAME)
    assert found is not None
    return found


def _followers(run_dir: Path) -> list[psutil.Process]:
    return [process for process, command in children().items() if str(run_dir) in command]


def _until(reached: Callable[[], bool], seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.05)


def test_everything_is_there_when_the_run_has_ended(tmp_path: Path) -> None:
    engine = _engine(tmp_path)
    engine.train()
    cursor = _cursor(tmp_path)
    assert cursor.sent == cursor.index == count(tmp_path / FILENAME) == 13
    assert cursor.finished
    assert engine.messages.read("tracked")[NAME].startswith("13 of 13 records sent, tensorboard --logdir ")
    assert _followers(tmp_path) == []


def test_without_records_there_is_nothing_to_send(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, {NAME: TensorBoardLoggerHook()})
    with pytest.raises(UserError, match=r"default_hooks\.logger") as raised:
        engine.train()
    assert raised.value.key == f"hooks.{NAME}"


@pytest.mark.parametrize(
    ("seconds", "why"), [(-1, "negative"), (float("inf"), "longer than a day"), (86_401, "longer than a day")]
)
def test_a_time_that_is_none_is_refused(seconds: float, why: str) -> None:
    with pytest.raises(UserError, match=why) as raised:
        TensorBoardLoggerHook(flush_timeout=seconds)
    assert raised.value.key == "flush_timeout"
    TensorBoardLoggerHook(flush_timeout=86_400)


def test_a_follower_that_is_killed_is_started_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def kill(engine: Engine) -> None:
        _until(lambda: (tmp_path / "tracking" / f"{NAME}.cursor.json").exists() and _cursor(tmp_path).index >= 3)
        (follower,) = _followers(tmp_path)
        follower.send_signal(signal.SIGKILL)
        _until(lambda: follower not in _followers(tmp_path))

    engine = _engine(tmp_path, more={"kill": at("after_train_iter", kill, nth=6)})
    with caplog.at_level(logging.WARNING, "hydraloop"):
        engine.train()
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith(f"{NAME}: its process ended (signal 9) and is restarted")
    assert (_cursor(tmp_path).sent, _cursor(tmp_path).finished) == (13, True)


def _train_and_wait(run_dir: Path, port: int) -> None:
    """In a separate process, which is killed while it waits."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        wait = at("after_train_iter", lambda engine: (connection.sendall(b"."), time.sleep(60)), nth=4)
        _engine(run_dir, more={"wait": wait}, flush_timeout=80.0).train()


def test_a_run_that_is_killed_is_closed_as_killed_with_all_its_records(tmp_path: Path) -> None:
    import multiprocessing

    with socket.create_server(("127.0.0.1", 0)) as server:
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=_train_and_wait, args=(tmp_path, server.getsockname()[1]))
        process.start()
        connection, _ = server.accept()
        with connection:
            assert connection.recv(1) == b"."
            process.kill()
            process.join()
    _until(lambda: (cursor := Cursor.load(tmp_path, NAME)) is not None and cursor.finished)
    with lock_of(tmp_path, NAME).acquire(timeout=20):
        assert _cursor(tmp_path).sent == count(tmp_path / FILENAME) == 3
    run = description.read(tmp_path)
    assert run is not None
    assert description.ending(tmp_path, run.attempt).status == "killed"


def test_what_is_left_is_sent_by_sync_exactly_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "a" / "run"
    engine = _engine(run_dir, flush_timeout=0.0)
    engine.train()
    told = engine.messages.read("tracked")[NAME]
    before = _cursor(run_dir).sent
    if before < 13 or not _cursor(run_dir).finished:
        assert told.startswith(f"{before} of 13 records sent")
        assert "; python " in told
        assert str(run_dir) in told
    assert sync.main([str(tmp_path)]) == 0
    assert f"{NAME}: {13 - before} sent, 13 of 13 records there" in capsys.readouterr().out
    assert _cursor(run_dir).finished
    assert sync.main([str(run_dir)]) == 0
    assert f"{NAME}: 0 sent, 13 of 13 records there" in capsys.readouterr().out


def test_sync_of_nothing_and_of_a_run_that_is_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sync.main([str(tmp_path)]) == 2
    assert "has no run with a tracker" in capsys.readouterr().err

    def look(engine: Engine) -> None:
        _until(lambda: _cursor(tmp_path).attempt == 0)
        assert sync.main([str(tmp_path)]) == 1

    _engine(tmp_path, more={"look": at("after_train_iter", look)}).train()
    assert "not all: the run is still sending its records" in capsys.readouterr().out


def _unusable(run_dir: Path) -> Path:
    run_dir.mkdir()
    (run_dir / "tensorboard").write_text("a file where a folder should be")
    return run_dir


def test_one_warning_where_it_does_not_work(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_dir = _unusable(tmp_path / "run")
    engine = _engine(run_dir)
    with caplog.at_level(logging.WARNING, "hydraloop"):
        assert engine.train().status == "finished"
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith(f"{NAME}: ")
    assert warning.endswith("; training continues, the records stay in the run directory")
    assert engine.messages.read("tracked")[NAME].startswith("0 of 13 records sent (")


def test_an_error_before_the_first_iteration_where_it_matters(tmp_path: Path) -> None:
    engine = _engine(_unusable(tmp_path / "run"), on_error="raise")
    with pytest.raises(UserError) as raised:
        engine.train()
    assert raised.value.key == f"hooks.{NAME}"
    assert "on_error=warn" in str(raised.value.remedy)
    assert engine.progress.iteration == 0


def test_an_error_while_training_where_it_matters(tmp_path: Path) -> None:
    def break_it(engine: Engine) -> None:
        (tmp_path / "tracking").rename(tmp_path / "gone")  # no cursor can be written any more
        _until(lambda: engine.hooks[NAME]._link.trouble is not None)  # type: ignore[attr-defined]

    engine = _engine(tmp_path, on_error="raise", more={"break": at("after_train_iter", break_it, nth=4)})
    with pytest.raises(TrackerError, match="FileNotFoundError"):
        engine.train()
    assert engine.progress.iteration == 4


def test_a_tracker_may_be_switched_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_dir = _unusable(tmp_path / "run")
    wait = at("before_train_epoch", lambda engine: _until(lambda: engine.hooks[NAME]._link.trouble is not None))
    engine = _engine(run_dir, on_error="disable", more={"wait": wait})
    with caplog.at_level(logging.WARNING, "hydraloop"):
        assert engine.train().status == "finished"
    assert sum("is switched off" in record.getMessage() for record in caplog.records) == 1


def test_a_validation_on_its_own_is_followed(tmp_path: Path) -> None:
    engine = _engine(tmp_path)
    engine.validate()
    assert (_cursor(tmp_path).sent, _cursor(tmp_path).finished) == (1, True)
    engine.test()
    assert _cursor(tmp_path).sent == 2
    run = description.read(tmp_path)
    assert run is not None
    assert len(run.attempts) == 1


def _killed(run_dir: Path) -> None:
    """Kill the follower as soon as it runs."""
    _until(lambda: _followers(run_dir) != [])
    for follower in _followers(run_dir):
        follower.kill()
        _until(lambda: follower not in _followers(run_dir))  # noqa: B023 - called at once


def test_a_follower_that_dies_before_it_is_needed_is_started_when_it_is(tmp_path: Path) -> None:
    engine = _engine(tmp_path, more={"kill": at("before_train", lambda engine: _killed(tmp_path))})
    engine.train()
    assert (_cursor(tmp_path).sent, _cursor(tmp_path).finished) == (13, True)


def test_one_that_keeps_dying_is_given_up_and_the_run_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(link, "_PAUSES", (0.0, 0.1))

    def kill(engine: Engine) -> None:
        while _link(engine).trouble is None:
            for follower in _followers(tmp_path):
                follower.kill()
            time.sleep(0.01)

    engine = _engine(tmp_path, on_error="raise", more={"kill": at("after_train_iter", kill, nth=2)})
    with caplog.at_level(logging.WARNING, "hydraloop"), pytest.raises(TrackerError, match="given up"):
        engine.train()
    assert engine.progress.iteration == 2
    assert any("given up" in record.getMessage() for record in caplog.records)


def _link(engine: Engine) -> link.Link:
    found = engine.hooks[NAME]._link  # type: ignore[attr-defined]
    assert isinstance(found, link.Link)
    return found


def _stopped(run_dir: Path) -> None:
    _until(lambda: _cursor(run_dir).attempt == 0)
    (follower,) = _followers(run_dir)
    follower.suspend()


def test_a_follower_that_is_stopped_holds_up_no_end(tmp_path: Path) -> None:
    def fail(engine: Engine) -> None:
        _stopped(tmp_path)
        raise RuntimeError("x" * 1_000_000)

    engine = _engine(tmp_path, flush_timeout=0.1, more={"fail": at("after_train_iter", fail, nth=3)})
    with pytest.raises(RuntimeError, match="xxx"):
        engine.train()
    assert _followers(tmp_path) == []


def test_many_options_hold_up_no_start(tmp_path: Path) -> None:
    many = [f"optimizer.{'x' * 100}.{n}" for n in range(2000)]
    engine = _engine(tmp_path, hparams=many)
    engine.train()
    assert _cursor(tmp_path).finished


def test_ctrl_c_ends_the_waiting_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def interrupt(engine: Engine) -> None:
        _until(lambda: _link(engine)._told is not None)
        signal.pthread_kill(cast(int, threading.main_thread().ident), signal.SIGINT)

    def stop(engine: Engine) -> None:
        _stopped(tmp_path)
        threading.Thread(target=interrupt, args=[engine], daemon=True).start()

    engine = _engine(tmp_path, flush_timeout=600.0, more={"stop": at("after_train_iter", stop, nth=3)})
    with caplog.at_level(logging.WARNING, "hydraloop"):
        assert engine.train().status == "finished"
    assert engine.error is None
    assert [record.getMessage() for record in caplog.records] == [
        "interrupted: not waiting for the trackers to send the rest"
    ]
    assert "sends the rest" in engine.messages.read("tracked")[NAME]
    _until(lambda: _followers(tmp_path) == [])  # it is not waited for


def test_a_validation_leaves_a_runs_attempts_and_its_end_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Finish] = []
    finish = link.Link.finish
    monkeypatch.setattr(link.Link, "finish", lambda link, how: (told.append(how), finish(link, how)))

    def fail(engine: Engine) -> None:
        raise RuntimeError("it broke")

    with pytest.raises(RuntimeError, match="it broke"):
        _engine(tmp_path, more={"fail": at("after_train_iter", fail, nth=3)}).train()
    again = _engine(tmp_path)
    again.validate()
    failed = Finish("failed", "RuntimeError: it broke", 1)
    assert told == [failed, failed]
    run = description.read(tmp_path)
    assert run is not None
    assert len(run.attempts) == 1
    assert _cursor(tmp_path).sent == count(tmp_path / FILENAME) == 3
    again.train()
    run = description.read(tmp_path)
    assert run is not None
    assert len(run.attempts) == 2, "training is one"


def test_the_end_is_the_results(tmp_path: Path) -> None:
    """If another rank failed first, `result.json` has its error, not the one that this rank raised because of it."""
    engine = _engine(tmp_path)
    engine.error = ConnectionError("the others are gone")
    engine.result = Result("failed", error="rank 1: out of memory")
    assert _ending(engine) == Finish("failed", "rank 1: out of memory", 1)


def test_a_record_before_training_describes_nothing(tmp_path: Path) -> None:
    def early(engine: Engine) -> None:
        engine.log_record({"mode": "train", "epoch": 0, "iteration": 0, "early": 1.0})
        assert description.read(tmp_path) is None

    engine = _engine(tmp_path, more={"early": at("before_run", early)})
    early(engine)
    engine.train()
    assert _cursor(tmp_path).sent == 15
