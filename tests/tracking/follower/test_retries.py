"""A real service that is slow, busy or loses files: metrics first, then the status, then files."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from hydraloop.tracking import follower as module
from hydraloop.tracking.cursor import Cursor
from hydraloop.tracking.follower import Follower
from hydraloop.tracking.tracker import BusyError, Finish
from tests.marks import slow
from tests.tracking.runs import Listed, described_run, log_records
from tests.tracking.service import OK, Answer, Posting, Service

NAME = "posting"
FINISHED = Finish("finished")


class Followed:
    """A follower of a run directory that sends to a service, as in a new process."""

    def __init__(self, run_dir: Path, service: Service, files: int = 0) -> None:
        self.cursor = Cursor.load(run_dir, NAME) or Cursor("tests.tracking.service.Posting")
        options = {"port": service.port, "files": files}
        self.told: list[str | None] = []
        tracker = Posting(options, described_run(run_dir), self.cursor.memory)
        self.follower = Follower(tracker, self.cursor, run_dir, NAME, self.told.append)

    def until(self, *states: str, finish: Finish | None = FINISHED, seconds: float = 30.0) -> str:
        """Call `step` as a follower's process does."""
        deadline = time.monotonic() + seconds
        while (state := self.follower.step(finish)) not in states and time.monotonic() < deadline:
            if state == "in trouble":
                time.sleep(self.follower.wait(ending=finish is not None))
        return state


def _third_refused() -> dict[int, Answer]:
    draw = random.Random(0)
    refused: list[Answer] = [(429, {"Retry-After": "0.05"}), (500, {}), (503, {"Retry-After": "0.2"})]
    return {number: draw.choice(refused) for number in range(10_000) if draw.random() < 1 / 3}


@pytest.mark.slow
def test_files_get_a_second_at_a_time_while_records_wait(tmp_path: Path) -> None:
    service = Service(delay=0.3)
    with service.up():
        followed = Followed(tmp_path, service, files=20)
        before = time.monotonic()
        assert followed.follower.step(None) == "following"
        assert time.monotonic() - before < 2.5
        log_records(tmp_path, 5)
        followed.follower.step(None)
    assert 2 <= len(service.bodies("/files")) <= 4
    assert service.bodies("/records") == [[0, 1, 2, 3, 4]]


@pytest.mark.slow
def test_a_third_of_all_requests_is_refused(tmp_path: Path) -> None:
    log_records(tmp_path, 2000)
    refused = _third_refused()
    service = Service(lambda number: refused.get(number, OK))
    with service.up():
        followed = Followed(tmp_path, service, files=10)
        assert followed.until("done") == "done"
    assert service.requests > 22, "some were refused"
    assert [number for numbers in service.bodies("/records") for number in numbers] == list(range(2000))
    assert service.bodies("/files") == list(range(10))
    assert service.bodies("/finish") == ["finished"]
    assert followed.told == [], "a service that refuses for a moment is no problem"


@pytest.mark.parametrize("finish", [None, slow(FINISHED)])
def test_a_service_that_says_how_long_to_wait_is_left_alone(tmp_path: Path, finish: Finish | None) -> None:
    service = Service(lambda number: (429, {"Retry-After": "1.5"}) if number == 0 else OK)
    with service.up():
        followed = Followed(tmp_path, service)
        assert followed.follower.step(finish) == "in trouble"
        assert followed.follower.step(finish) == "in trouble"
        assert service.requests == 1
        assert 1.2 < followed.follower.wait(ending=finish is not None) <= 1.5
        assert followed.until("done", "caught up", finish=finish) in ("done", "caught up")
    assert service.requests == (2 if finish is None else 3)


def test_a_busy_service_is_tried_again_soon_and_reported_if_it_stays_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    run = described_run(tmp_path)
    tracker, told = Listed(run), list[str | None]()
    follower = Follower(tracker, Cursor(""), tmp_path, NAME, told.append)
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
        followed = Followed(tmp_path, service, files=8)
        failures = set()
        while (state := followed.follower.step(FINISHED)) != "done":
            failures.add(followed.follower.failures)
            if state == "in trouble":
                time.sleep(followed.follower.wait(ending=True))
    assert failures == {0, 1}
    assert service.bodies("/files") == list(range(8))
