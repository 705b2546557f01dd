"""The record log on a disk that is full for a while: records are kept, and none is torn or doubled."""

from __future__ import annotations

import json
import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hydraloop.files.metrics_writer import RecordLog


@contextmanager
def limited(size: int) -> Iterator[None]:
    """No file can grow beyond `size` bytes: writes end in the middle of a line, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def put(log: RecordLog, *iterations: int) -> None:
    for iteration in iterations:
        log.append({"mode": "train", "epoch": 1, "iteration": iteration, "loss": 0.5})


def iterations(path: Path) -> list[int]:
    text = path.read_text(encoding="utf-8")
    assert text == "" or text.endswith("\n")
    return [json.loads(line)["iteration"] for line in text.splitlines()]


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("limit", [0, 100, 170, 177, 178, 200, 9000])
def test_records_of_an_outage_are_written_with_the_next_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, limit: int
) -> None:
    log, path = RecordLog(tmp_path / "m.jsonl"), tmp_path / "m.jsonl"
    put(log, 1)
    with limited(limit):
        put(log, *range(2, 200))
        during = iterations(path)
        assert during == [*range(1, len(during) + 1)], "whole lines only, in order"
        assert len(during) < 199
    put(log, 200)
    log.close()
    assert iterations(path) == [*range(1, 201)]
    (warning,) = messages(caplog)
    assert warning.startswith("m.jsonl cannot be written: [Errno 27] File too large")


def test_what_is_missing_in_the_end_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = RecordLog(tmp_path / "m.jsonl")
    put(log, 10)
    with limited(100):
        put(log, 20, 30, 40)
        log.close()
    assert iterations(tmp_path / "m.jsonl") == [10]
    assert messages(caplog)[1:] == ["m.jsonl lacks the last 3 records: [Errno 27] File too large"]


def test_a_last_try_is_made_at_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = RecordLog(tmp_path / "m.jsonl")
    with limited(0):
        put(log, 1, 2)
        assert log.written == 2, "records that wait count, for a checkpoint that is written meanwhile"
    log.close()
    assert iterations(tmp_path / "m.jsonl") == [1, 2]
    assert len(messages(caplog)) == 1
    assert RecordLog(tmp_path / "m.jsonl").written == 2
