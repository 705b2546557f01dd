"""A tracker hook and its follower as real processes, with TensorBoard, the fastest tracker."""

from __future__ import annotations

import logging
import signal
import threading
from dataclasses import asdict
from pathlib import Path
from typing import cast

import pytest

from hydraloop.commands.command_line import view as command
from hydraloop.engine.engine import Engine
from hydraloop.errors import UserError
from hydraloop.files.result import Result
from hydraloop.hooks import TensorBoardLoggerHook
from hydraloop.tracking import run_description
from hydraloop.tracking.cursor import Cursor
from hydraloop.tracking.tracker import Finish
from hydraloop.tracking.tracker_hook import TrackerError, _ending
from tests.helpers import at, make_engine
from tests.tracking.training import NAME, followers, training, until


def _cursor(run_dir: Path) -> Cursor:
    found = Cursor.load(run_dir, NAME)
    assert found is not None
    return found


def test_without_records_there_is_nothing_to_send(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, {NAME: TensorBoardLoggerHook()})
    with pytest.raises(UserError, match=r"default_hooks\.logger") as raised:
        engine.train()
    assert raised.value.key == f"hooks.{NAME}"


def test_what_is_left_is_sent_by_sync_exactly_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "a" / "run"
    engine = training(run_dir, flush_timeout=0.0)
    engine.train()
    told = engine.messages.read("tracked")[NAME]
    cursor = Cursor.load(run_dir, NAME)
    before = 0 if cursor is None else cursor.sent
    if cursor is None or before < 13 or not cursor.complete:
        assert told.startswith(f"{before} of 13 records sent")
        assert "; hydraloop sync " in told
        assert str(run_dir) in told
    assert command(["sync", str(tmp_path)]) == 0
    assert f"{NAME}: {13 - before} sent, 13 of 13 records there" in capsys.readouterr().out
    assert _cursor(run_dir).complete
    assert command(["sync", str(run_dir)]) == 0
    assert f"{NAME}: 0 sent, 13 of 13 records there" in capsys.readouterr().out


def test_sync_of_nothing_and_of_a_run_that_is_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["sync", str(tmp_path)]) == 2
    assert "has no run with a tracker" in capsys.readouterr().err

    def look(engine: Engine) -> None:
        until(lambda: _is_opened(tmp_path))
        assert command(["sync", str(tmp_path)]) == 1

    training(tmp_path, more={"look": at("after_train_iter", look)}).train()
    assert "not all: the run is still sending its records" in capsys.readouterr().out


def _is_opened(run_dir: Path, index: int = 0) -> bool:
    """Whether the service has the run and so many records."""
    found = Cursor.load(run_dir, NAME)
    return found is not None and found.attempt == 0 and found.index >= index


def _cursor_has_trouble(run_dir: Path) -> bool:
    found = Cursor.load(run_dir, NAME)
    return found is not None and found.trouble is not None


def _unusable(run_dir: Path) -> Path:
    run_dir.mkdir()
    (run_dir / "tensorboard").write_text("a file where a folder should be")
    return run_dir


def test_one_warning_where_it_does_not_work(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_dir = _unusable(tmp_path / "run")
    engine = training(run_dir)
    with caplog.at_level(logging.WARNING, "hydraloop"):
        assert engine.train().status == "finished"
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith(f"{NAME}: ")
    assert warning.endswith("; training continues, the records stay in the run directory")
    assert engine.messages.read("tracked")[NAME].startswith("0 of 13 records sent (")


def test_an_error_while_training_where_it_matters(tmp_path: Path) -> None:
    def break_it(engine: Engine) -> None:
        (tmp_path / "tensorboard").rmdir()
        (tmp_path / "tensorboard").write_text("a file where a folder should be")

    def wait(engine: Engine) -> None:
        until(lambda: _cursor(tmp_path).trouble is not None)

    more = {"break": at("before_train_iter", break_it, nth=1), "wait": at("after_train_iter", wait, nth=4)}
    engine = training(tmp_path, on_error="raise", more=more, flush_timeout=1.0)
    with pytest.raises(TrackerError, match="Not a directory"):
        engine.train()
    assert engine.progress.iteration == 4


@pytest.mark.slow
def test_a_tracker_may_be_switched_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_dir = _unusable(tmp_path / "run")
    wait = at("before_train_epoch", lambda engine: until(lambda: _cursor_has_trouble(run_dir)))
    engine = training(run_dir, on_error="disable", more={"wait": wait})
    with caplog.at_level(logging.WARNING, "hydraloop"):
        assert engine.train().status == "finished"
    assert sum("is switched off" in record.getMessage() for record in caplog.records) == 1


def test_a_validation_on_its_own_is_followed(tmp_path: Path) -> None:
    engine = training(tmp_path)
    engine.validate()
    assert (_cursor(tmp_path).sent, _cursor(tmp_path).complete) == (1, True)
    engine.test()
    assert _cursor(tmp_path).sent == 2
    run = run_description.read(tmp_path)
    assert run is not None
    assert len(run.attempts) == 1


def _stopped(run_dir: Path) -> None:
    until(lambda: _is_opened(run_dir))
    (follower,) = followers(run_dir)
    follower.suspend()


def test_a_follower_that_is_stopped_holds_up_no_end(tmp_path: Path) -> None:
    def fail(engine: Engine) -> None:
        _stopped(tmp_path)
        raise RuntimeError("x" * 1_000_000)

    engine = training(tmp_path, flush_timeout=0.1, more={"fail": at("after_train_iter", fail, nth=3)})
    with pytest.raises(RuntimeError, match="xxx"):
        engine.train()
    assert followers(tmp_path) == []


def test_ctrl_c_ends_the_waiting_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def interrupt(engine: Engine) -> None:
        until(lambda: engine.messages.read("sending").sender._end is not None)
        signal.pthread_kill(cast(int, threading.main_thread().ident), signal.SIGINT)

    def stop(engine: Engine) -> None:
        _stopped(tmp_path)
        threading.Thread(target=interrupt, args=[engine], daemon=True).start()

    engine = training(tmp_path, flush_timeout=80.0, more={"stop": at("after_train_iter", stop, nth=3)})
    with caplog.at_level(logging.WARNING, "hydraloop"):
        assert engine.train().status == "finished"
    assert engine.error is None
    assert [record.getMessage() for record in caplog.records] == [
        "interrupted: not waiting for the trackers to send the rest"
    ]
    assert "sends the rest" in engine.messages.read("tracked")[NAME]
    assert 0 < engine.messages.read("tracker_waits")[NAME] < engine.calls.seconds[NAME][0]
    until(lambda: followers(tmp_path) == [])  # it is not waited for


@pytest.mark.slow
def test_a_validation_leaves_a_runs_attempts_and_its_end_as_they_were(tmp_path: Path) -> None:
    def fail(engine: Engine) -> None:
        raise RuntimeError("it broke")

    with pytest.raises(RuntimeError, match="it broke"):
        training(tmp_path, more={"fail": at("after_train_iter", fail, nth=3)}).train()
    again = training(tmp_path)
    again.validate()
    assert again.messages.read("sending").sender._end["finish"] == {}, "the directory says how the run ended"
    run = run_description.read(tmp_path)
    assert run is not None
    assert len(run.attempts) == 1
    assert (_cursor(tmp_path).sent, _cursor(tmp_path).complete) == (3, True)
    again.train()
    run = run_description.read(tmp_path)
    assert run is not None
    assert len(run.attempts) == 2, "training is one"


def test_the_end_is_the_results(tmp_path: Path) -> None:
    """If another rank failed first, `result.json` has its error, not the one that this rank raised because of it."""
    engine = training(tmp_path)
    engine.outcome.error = ConnectionError("the others are gone")
    engine.outcome.result = Result("failed", error="rank 1: out of memory")
    assert _ending(engine, is_new=True) == asdict(Finish("failed", "rank 1: out of memory"))


def test_a_run_that_cannot_be_described_at_its_begin_is_sent_at_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    in_the_way = tmp_path / "tracking" / "attempt_0.json"
    more = {
        "block": at("before_train", lambda engine: in_the_way.mkdir(parents=True)),
        "unblock": at("after_train_iter", lambda engine: in_the_way.rmdir(), nth=5),
    }
    with caplog.at_level(logging.WARNING, "hydraloop"):
        assert training(tmp_path, more=more).train().status == "finished"
    assert len(caplog.records) == 1
    assert (_cursor(tmp_path).sent, _cursor(tmp_path).complete) == (13, True)


class Uninstalled(TensorBoardLoggerHook):
    """A tracker whose library is missing."""

    library = "not_there"


def test_a_missing_library_is_reported_before_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    warned = at("before_train", lambda engine: caplog.records[0])
    engine = training(tmp_path, tracker=Uninstalled, more={"warned": warned})
    with caplog.at_level(logging.WARNING, "hydraloop"):
        engine.train()
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith(f"{NAME}: the package not_there is not installed: pip install not_there; training con")
    told = engine.messages.read("tracked")[NAME]
    assert told.startswith(
        "0 of 13 records sent (the package not_there is not installed: pip install not_there); hydraloop sync "
    )
    assert command(["sync", str(tmp_path)]) == 0, "once it is installed"
    assert _cursor(tmp_path).sent == 13


def test_a_missing_library_ends_a_run_that_needs_it(tmp_path: Path) -> None:
    engine = training(tmp_path, tracker=Uninstalled, on_error="raise")
    with pytest.raises(UserError, match="the package not_there is not installed") as raised:
        engine.train()
    assert raised.value.remedy == "pip install not_there"
    assert engine.progress.iteration == 0
