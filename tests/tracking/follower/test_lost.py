"""Records that a service has lost are sent again."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import MagicMock, patch

import pytest

from hydraloop.tracking.cursor import Cursor
from hydraloop.tracking.follower import Follower
from hydraloop.tracking.tracker import Finish, LostError
from tests.tracking.runs import TENSORBOARD, Listed, described_run, log_records


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
