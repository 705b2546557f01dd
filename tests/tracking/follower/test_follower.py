"""The follower: order, cursor, outages, refused and lost records, busy services, resumed runs, the end."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import pytest

from hydraloop.files.metrics_log import FILENAME, Position, Reader, Record
from hydraloop.files.metrics_writer import RecordLog, cut_after
from hydraloop.tracking import follower as module
from hydraloop.tracking.cursor import Cursor
from hydraloop.tracking.follower import BATCH, Follower, described
from hydraloop.tracking.tracker import BusyError, Finish, LostError, UnusableError
from tests.tracking.runs import TENSORBOARD, Listed, attempt, described_run, log_records
from tests.tracking.service import OK, Posting, Service

NAME = "mine"
HISTOGRAM = {"kind": "histogram", "name": "parameters", "path": "media/train/parameters.json"}
FINISHED = Finish("finished")


class Followed:
    """A follower of a run directory, as in a new process."""

    def __init__(self, run_dir: Path, *attempts: int, **options: Any) -> None:
        self.run = described_run(run_dir, *(attempt(number) for number in attempts or (0,)))
        self.cursor = Cursor.load(run_dir, NAME) or Cursor(TENSORBOARD)
        self.tracker = Listed(self.run, self.cursor.memory, **options)
        self.told: list[str | None] = []
        self.follower = Follower(self.tracker, self.cursor, run_dir, NAME, self.told.append)

    def drain(self, finish: Finish | None = None, tries: int = 20) -> str:
        """Call `step` until there is nothing more to do."""
        for _ in range(tries):
            state = self.follower.step(finish)
            if state in ("done", "given up", "caught up"):
                break
        return state

    @property
    def sent(self) -> list[int]:
        """Iterations of the records that the service has."""
        return [record.iteration for record in self.tracker.got]


def test_records_arrive_in_order_once_and_in_batches(tmp_path: Path) -> None:
    log_records(tmp_path, BATCH + 50)
    followed = Followed(tmp_path)
    assert followed.follower.step(None) == "following"
    assert len(followed.tracker.got) == BATCH
    assert followed.drain() == "caught up"
    assert followed.sent == [10 * (n + 1) for n in range(BATCH + 50)]
    log_records(tmp_path, 3, first=BATCH + 50)
    assert followed.drain(FINISHED) == "done"
    assert len(followed.sent) == BATCH + 53
    assert followed.tracker.finished == [FINISHED]
    stored = Cursor.load(tmp_path, NAME)
    assert stored is not None
    assert (stored.index, stored.sent, stored.complete, stored.where) == (BATCH + 53, BATCH + 53, True, "there")


def test_another_process_goes_on_at_the_cursor(tmp_path: Path) -> None:
    log_records(tmp_path, 5)
    Followed(tmp_path).drain()
    log_records(tmp_path, 2, first=5)
    later = Followed(tmp_path)
    later.drain(FINISHED)
    assert later.sent == [60, 70]
    again = Followed(tmp_path)
    assert again.drain(FINISHED) == "done"
    assert again.sent == []
    assert again.tracker.finished == [], "it knows already"


def test_an_interval_leaves_out_records_of_iterations(tmp_path: Path) -> None:
    """Also if one is refused."""
    log_records(tmp_path, BATCH + 5)  # at the iterations 10, 20, …
    log = RecordLog(tmp_path / FILENAME)
    log.append({"mode": "val", "epoch": 1, "iteration": 2055, "accuracy": 0.5})
    log.append({"mode": "train", "epoch": 1, "iteration": 2055, "objects": [HISTOGRAM]})
    log.close()
    followed = Followed(tmp_path, interval=500)
    followed.tracker.refuses = {99}
    assert followed.drain(FINISHED) == "done"
    assert followed.sent == [500, 1500, 2000, 2055, 2055]
    assert (followed.cursor.index, followed.cursor.refused) == (BATCH + 7, [99])


def test_the_end_is_told_again_behind_later_records(tmp_path: Path) -> None:
    log_records(tmp_path, 2)
    Followed(tmp_path).drain(FINISHED)
    log_records(tmp_path, 1, first=2)  # a validation of the trained engine
    later = Followed(tmp_path)
    assert later.follower.step(FINISHED) == "following"
    stored = Cursor.load(tmp_path, NAME)
    assert stored is not None
    assert not stored.complete
    later.drain(FINISHED)
    assert later.tracker.finished == [FINISHED]


def test_a_log_that_is_cut_by_another_process_is_let_go_of(tmp_path: Path) -> None:
    log_records(tmp_path, 4)
    old = Followed(tmp_path)
    old.drain()
    cut_after(tmp_path / FILENAME, iteration=20, last_validation=0)
    log_records(tmp_path, 9, first=2)
    assert old.drain() == "cut"
    assert old.sent == [10, 20, 30, 40]
    new = Followed(tmp_path, 0, 1)
    new.drain()
    (tmp_path / FILENAME).unlink()
    assert new.drain() == "caught up", "it was moved away"
    log_records(tmp_path, 1)
    assert new.drain() == "cut", "it is another one"


def test_a_log_that_is_cut_while_it_is_read_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a resumed run on another machine, which cannot end this process."""
    log_records(tmp_path, 4)
    old = Followed(tmp_path)
    old.drain()
    read = Reader.read

    def cut_before(reader: Reader, most: int) -> tuple[list[Record], Position]:
        monkeypatch.undo()
        cut_after(tmp_path / FILENAME, iteration=20, last_validation=0)
        log_records(tmp_path, 9, first=2)
        return read(reader, most)

    monkeypatch.setattr(Reader, "read", cut_before)
    assert old.drain() == "cut"
    assert old.sent == [10, 20, 30, 40]
    new = Followed(tmp_path, 0, 1)
    assert new.drain() == "caught up"
    assert new.sent == [10 * (n + 1) for n in range(2, 11)]


def test_files_are_looked_after_while_records_come_faster_than_they_are_sent(tmp_path: Path) -> None:
    log_records(tmp_path, 3 * BATCH)
    followed = Followed(tmp_path)
    seen: list[int] = []
    followed.tracker.send_file = lambda: bool(seen.append(len(followed.tracker.got)))  # type: ignore
    assert followed.follower.step(None) == "following"
    assert seen == [BATCH]


def test_an_outage_is_told_once_and_nothing_is_lost(tmp_path: Path) -> None:
    log_records(tmp_path, 3)
    followed = Followed(tmp_path)
    followed.tracker.raises = [ConnectionError("refused"), ConnectionError("refused")]
    assert followed.follower.step(None) == "in trouble"
    assert followed.follower.step(None) == "in trouble", "it waits"
    assert followed.follower.wait(ending=False) > 0
    assert len(followed.tracker.raises) == 1
    assert followed.follower.step(FINISHED) == "in trouble", "told to finish, it tries at once"
    assert followed.drain(FINISHED) == "done"
    assert followed.sent == [10, 20, 30]
    assert followed.told == [
        "ConnectionError: refused",
        None,
    ]


def test_pauses_grow(tmp_path: Path) -> None:
    followed = Followed(tmp_path)
    waits = []
    for _ in range(7):
        followed.tracker.raises = [OSError("no")]
        followed.follower._next_try = 0.0
        followed.follower.step(None)
        waits.append(round(followed.follower.wait(ending=False)))
    assert waits == [1, 2, 4, 8, 16, 30, 30]
    assert followed.follower.wait(ending=True) <= 1.0


def test_a_refused_record_is_found_and_the_others_arrive(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log_records(tmp_path, 40)
    followed = Followed(tmp_path)
    followed.tracker.refuses = {7, 30}
    with caplog.at_level(logging.WARNING, "hydraloop"):
        assert followed.drain(FINISHED, tries=40) == "done"
    assert followed.sent == [10 * (n + 1) for n in range(40) if n not in (7, 30)]
    assert [record.getMessage() for record in caplog.records] == [
        "line 8 of metrics.jsonl is not sent: too long",
    ], "the others are counted"
    stored = Cursor.load(tmp_path, NAME)
    assert stored is not None
    assert (stored.index, stored.sent, stored.refused) == (40, 38, [7, 30])


def test_what_is_unusable_is_given_up(tmp_path: Path) -> None:
    followed = Followed(tmp_path)
    followed.tracker.raises = [UnusableError("no such experiment")]
    assert followed.drain() == "given up"
    assert followed.told == ["no such experiment"]


def test_a_resumed_run_goes_on_behind_the_cut(tmp_path: Path) -> None:
    log_records(tmp_path, 6)
    first = Followed(tmp_path)
    first.drain(Finish("killed"))
    cut_after(tmp_path / FILENAME, iteration=40, last_validation=0)
    log_records(tmp_path, 3, first=4)
    second = Followed(tmp_path, 0, 1)
    second.drain(FINISHED)
    assert second.tracker.rewounds == [4]
    assert second.sent == [50, 60, 70]
    assert second.tracker.finished == [FINISHED], "another attempt has another end"
    third = Followed(tmp_path, 0, 1)
    third.drain(FINISHED)
    assert third.tracker.rewounds == []
    assert third.sent == []


def test_memory_is_on_disk_after_each_call(tmp_path: Path) -> None:
    log_records(tmp_path, 1)
    followed = Followed(tmp_path)
    followed.tracker.memory["run_id"] = "r"
    followed.follower.step(None)
    stored = Cursor.load(tmp_path, NAME)
    assert stored is not None
    assert stored.memory == {"run_id": "r"}
    followed.tracker.memory["file"] = "x"  # as `send_file` may do
    followed.follower.step(None)
    stored = Cursor.load(tmp_path, NAME)
    assert stored is not None
    assert stored.memory == {"run_id": "r", "file": "x"}


def test_a_cursor_that_cannot_be_written_is_an_outage_and_nothing_is_sent_twice(tmp_path: Path) -> None:
    log_records(tmp_path, 2)
    followed = Followed(tmp_path)
    followed.follower.step(None)
    folder = tmp_path / "tracking"
    folder.rename(tmp_path / "away")
    log_records(tmp_path, 1, first=2)
    assert followed.follower.step(None) == "in trouble"
    (tmp_path / "away").rename(folder)
    deadline = time.monotonic() + 10
    while followed.drain(FINISHED) != "done" and time.monotonic() < deadline:
        pass
    assert followed.sent == [10, 20, 30]
    stored = Cursor.load(tmp_path, NAME)
    assert stored is not None
    assert stored.index == 3


def test_an_error_is_one_line_with_what_the_machine_said() -> None:
    assert described(ValueError("a\n  b")) == "ValueError: a b"
    refused = ConnectionRefusedError(111, "Connection refused")
    assert described(_chained(refused)).startswith("RuntimeError: yyy")
    assert described(_chained(refused)).endswith(f"y (ConnectionRefusedError: {refused})")
    assert len(described(_chained(refused))) < 300
    with pytest.raises(ConnectionError) as error:
        raise ConnectionError("cannot reach x: Connection refused") from refused
    assert described(error.value) == "ConnectionError: cannot reach x: Connection refused", "not said twice"


def _chained(cause: Exception) -> Exception:
    try:
        try:
            try:
                raise cause
            except Exception as error:
                raise ValueError("wrapped") from error
        except ValueError:
            raise RuntimeError("y" * 400)  # noqa: B904  # as libraries do
    except RuntimeError as error:
        return error


# Records that a service has lost are sent again. ----------------------------------------------------------------------


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_the_follower_goes_back_without_calling_it_trouble(tmp_path: Path, calls: int) -> None:
    """In `open`, `send` and `finish`; `finish` is also called again."""
    tracker = Listed(described_run(tmp_path))
    log_records(tmp_path, 5)
    cursor = Cursor(TENSORBOARD)
    troubles: list[object] = []
    follower = Follower(tracker, cursor, tmp_path, "tracker", troubles.append)
    tracker.raises = [*[None] * calls, LostError(0)]
    while follower.step(Finish("finished")) == "following":
        pass
    assert [record.index for record in tracker.got] == [*range(5)] * (2 if calls == 2 else 1)
    assert (cursor.index, cursor.complete, len(tracker.finished), troubles) == (5, True, 1, [])


class _Forgetful(Listed):
    def open(self) -> None:
        raise LostError(0)


def test_a_service_that_loses_everything_again_is_trouble(tmp_path: Path) -> None:
    """Nothing has arrived since the last loss, so sending again does not help. It must not be tried without a pause."""
    log_records(tmp_path, 5)
    troubles: list[str | None] = []
    tracker = _Forgetful(described_run(tmp_path))
    follower = Follower(tracker, Cursor(TENSORBOARD), tmp_path, "tracker", troubles.append)
    states = [follower.step(Finish("finished")) for _ in range(4)]
    assert states == ["following", "in trouble", "in trouble", "in trouble"]
    assert follower.failures == 3
    assert follower.wait(ending=False) > 1
    assert troubles == ["LostError: the service has lost records that were sent; they are sent again from line 1 on"]


@pytest.mark.parametrize("at", ["finish", "send_file"])
def test_a_service_that_loses_the_same_records_again_is_trouble(tmp_path: Path, at: str) -> None:
    """The records arrive, and are lost at the end each time. The pauses grow, and `sync` gives up."""
    log_records(tmp_path, 5)
    troubles: list[str | None] = []
    tracker = Listed(described_run(tmp_path))
    follower = Follower(tracker, Cursor(TENSORBOARD), tmp_path, "tracker", troubles.append)
    losing = MagicMock(side_effect=LostError(0))
    with patch.object(tracker, at, losing):
        states = [follower.step(Finish("finished")) for _ in range(8)]
        assert states == ["following"] * 3 + ["in trouble", "following"] * 2 + ["in trouble"]
        assert follower.failures == 3
        assert follower.wait(ending=False) > 2
        assert len(troubles) == 1
    assert [follower.step(Finish("finished")) for _ in range(2)] == ["following", "done"]
    assert (follower.failures, troubles[1:]) == (0, [None])


# A real service that is slow, busy or loses files: metrics first, then the status, then files. ------------------------


POSTING = "posting"


class PostingFollowed:
    """A follower of a run directory that sends to a service, as in a new process."""

    def __init__(self, run_dir: Path, service: Service, files: int = 0) -> None:
        self.cursor = Cursor.load(run_dir, POSTING) or Cursor("tests.tracking.service.Posting")
        options = {"port": service.port, "files": files}
        self.told: list[str | None] = []
        tracker = Posting(options, described_run(run_dir), self.cursor.memory)
        self.follower = Follower(tracker, self.cursor, run_dir, POSTING, self.told.append)

    def until(self, *states: str, finish: Finish | None = FINISHED, seconds: float = 30.0) -> str:
        """Call `step` as a follower's process does."""
        deadline = time.monotonic() + seconds
        while (state := self.follower.step(finish)) not in states and time.monotonic() < deadline:
            if state == "in trouble":
                time.sleep(self.follower.wait(ending=finish is not None))
        return state


def test_a_busy_service_is_tried_again_soon_and_reported_if_it_stays_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    run = described_run(tmp_path)
    tracker, told = Listed(run), list[str | None]()
    follower = Follower(tracker, Cursor(""), tmp_path, POSTING, told.append)
    waits, reported = [], []
    tracker.raises = [BusyError("status 503")] * 8
    for _ in range(8):
        follower.step(None)
        waits.append(round(follower.wait(ending=False), 3))
        reported.append(len(told))
        now[0] = follower._next_try
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert reported == [0, 0, 0, 0, 0, 1, 1, 1]
    assert follower.step(None) == "caught up"
    assert told == ["BusyError: status 503", None]


def test_an_error_after_progress_is_the_first_one_again(tmp_path: Path) -> None:
    """One file per try: however many there are, no pause grows, and no try counts."""
    log_records(tmp_path, 1)
    service = Service(lambda number: (500, {}) if number % 2 and number > 2 else OK)
    with service.up():
        followed = PostingFollowed(tmp_path, service, files=8)
        failures = set()
        while (state := followed.follower.step(FINISHED)) != "done":
            failures.add(followed.follower.failures)
            if state == "in trouble":
                time.sleep(followed.follower.wait(ending=True))
    assert failures == {0, 1}
    assert service.bodies("/files") == list(range(8))
