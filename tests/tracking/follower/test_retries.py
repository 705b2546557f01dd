"""A real service that is slow, busy or loses files: metrics first, then the status, then files."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hydraloop.tracking import follower as module
from hydraloop.tracking.cursor import Cursor
from hydraloop.tracking.follower import Follower
from hydraloop.tracking.tracker import BusyError, Finish
from tests.tracking.runs import Listed, described_run, log_records
from tests.tracking.service import OK, Posting, Service

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
