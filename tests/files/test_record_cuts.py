"""Which records a resumed run removes from its log, and the position of a follower that had sent some of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hydraloop.files.metrics_log import FILENAME, read_all
from hydraloop.files.metrics_writer import cut_after, cuts, still_there

_RUN = [("train", 10), ("train", 20), ("val", 20), ("train", 30), ("train", 40), ("val", 40), ("test", 40)]


def _write(run_dir: Path, records: Sequence[tuple[str, int]]) -> Path:
    path = run_dir / FILENAME
    with path.open("a", encoding="utf-8") as file:
        for mode, iteration in records:
            file.write(json.dumps({"mode": mode, "epoch": 1, "iteration": iteration}) + "\n")
    return path


def _left(path: Path) -> list[tuple[str, int]]:
    return [(record.mode, record.iteration) for record in read_all(path)]


@pytest.mark.parametrize(
    ("iteration", "last_validation", "left"),
    [
        (0, 0, 0),
        (10, 0, 1),
        (20, 0, 2),  # the epoch's checkpoint is written before the validation, which is made up
        (20, 20, 3),
        (35, 20, 4),
        (40, 20, 5),
        (40, 40, 6),  # the test comes again
        (50, 40, 7),
    ],
)
def test_what_comes_again_is_cut(tmp_path: Path, iteration: int, last_validation: int, left: int) -> None:
    path = _write(tmp_path, _RUN)
    before = path.read_bytes()
    cut_after(path, iteration=iteration, last_validation=last_validation)
    assert _left(path) == _RUN[:left]
    assert before.startswith(path.read_bytes())
    assert cuts(path) == ([] if left == len(_RUN) else [left])


def _zeroed(data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    return b"".join([lines[0], b"\0" * (len(lines[1]) - 1) + b"\n", *lines[2:]])


@pytest.mark.parametrize(
    ("damage", "lost"),
    [
        (lambda data: data, 0),
        (lambda data: data[: data.rindex(b'{"mode": "val", "epoch": 1, "iteration": 40')], 0),  # after the checkpoint
        (lambda data: b"", 4),
        (_zeroed, 1),
        (lambda data: data[: data.index(b"\n")] + data[data.index(b"\n") + 1 :], 2),  # two lines became one
        (lambda data: data.replace(b'"iteration": 20', b'"iteration"~ 20'), 2),
        (lambda data: data.replace(b'"val", "epoch": 1, "iteration": 20', b'"val", "epoch": 1, "iteration": 90'), 2),
    ],
)
def test_missing_and_damaged_records_are_counted(
    damage: Callable[[bytes], bytes], lost: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint was written in iteration 30, when the log had four records."""
    path = _write(tmp_path, _RUN)
    path.write_bytes(damage(path.read_bytes()))
    cut_after(path, iteration=30, last_validation=20, written=4)
    found = [record.getMessage() for record in caplog.records if "lacks" in record.getMessage()]
    wanted = f"metrics.jsonl lacks {lost} of the 4 records up to iteration 30: lines are missing or damaged"
    assert found == ([wanted] if lost else [])


def test_a_followers_place_after_several_cuts_it_has_not_seen(tmp_path: Path) -> None:
    path = _write(tmp_path, _RUN)
    cut_after(path, iteration=30, last_validation=20)
    _write(tmp_path, [("train", 40), ("train", 50)])
    assert still_there(path, 3, 0) == 3, "what it had sent is still there"
    assert still_there(path, 6, 0) == 4
    cut_after(path, iteration=20, last_validation=20)
    assert still_there(path, 6, 0) == 3
    assert still_there(path, 5, 1) == 3
    assert still_there(path, 6, 2) == 6
    assert still_there(path, 3, 2) == 3
