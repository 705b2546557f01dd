"""The record log: whole lines, the time, values that JSON lacks, and how it is read."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest

from hydraloop.files.metrics_log import LoggedObject, Position, Reader, count, read_all, read_some
from hydraloop.files.metrics_writer import RecordLog, cut_torn_line


def _log(path: Path, *lines: str) -> Path:
    path.write_text("".join(lines), encoding="utf-8")
    return path


def test_a_line_has_its_time_and_is_there_at_once(tmp_path: Path) -> None:
    log, before = RecordLog(tmp_path / "m.jsonl"), time.time()
    log.append({"mode": "train", "epoch": 1, "iteration": 10, "loss": 0.5, "note": "x"})
    written = json.loads((tmp_path / "m.jsonl").read_text())
    log.close()
    assert list(written) == ["mode", "epoch", "iteration", "loss", "note", "timestamp"]
    assert before - 1 <= written["timestamp"] <= time.time() + 1
    (record,) = read_all(tmp_path / "m.jsonl")
    assert (record.index, record.mode, record.epoch, record.iteration) == (0, "train", 1, 10)
    assert record.metrics == {"train/loss": 0.5}
    assert record.texts == {"note": "x"}
    assert record.timestamp == written["timestamp"]


def test_nan_and_infinity_come_back(tmp_path: Path) -> None:
    log = RecordLog(tmp_path / "m.jsonl")
    log.append({"mode": "val", "epoch": 1, "iteration": 10, "a": math.nan, "b": -math.inf, "c": None, "d": 1})
    log.close()
    (record,) = read_all(tmp_path / "m.jsonl")
    assert math.isnan(record.values.pop("a"))
    assert record.values == {"b": -math.inf, "d": 1.0}


def test_a_reader_takes_whole_lines_only_and_goes_on_where_it_was_moved(tmp_path: Path) -> None:
    lines = [json.dumps({"mode": "train", "epoch": 1, "iteration": n}) + "\n" for n in range(5)]
    path = _log(tmp_path / "m.jsonl", *lines, '{"mode": "tr')
    reader = Reader(path, Position())
    first, after = reader.read(2)
    assert [record.iteration for record in first] == [0, 1]
    assert reader.read(2)[0] == first, "it stays until it is moved"
    reader.position = after
    rest, after = reader.read(100)
    assert [record.index for record in rest] == [2, 3, 4]
    reader.position = after
    assert reader.read(100) == ([], after)
    assert Reader(path, reader.find(3)).read(100)[0] == rest[1:]
    assert count(path) == 5


@pytest.mark.parametrize("torn", ["", "{", "x" * 200_000])
def test_a_torn_line_is_cut_off(tmp_path: Path, torn: str) -> None:
    path = _log(tmp_path / "m.jsonl", '{"a": 1}\n', torn)
    cut_torn_line(path)
    assert path.read_text() == '{"a": 1}\n'


def test_a_record_that_does_not_say_where_it_belongs_follows_the_one_before(tmp_path: Path) -> None:
    path = _log(tmp_path / "m.jsonl", '{"mode": "val", "epoch": 2, "iteration": 7}\n', '{"x": 1}\n', "no json\n")
    assert [(record.iteration, record.values) for record in read_all(path)] == [(7, {}), (7, {"x": 1.0}), (7, {})]


GOOD = '{"mode": "val", "epoch": 1, "iteration": 10, "loss": 0.5, "timestamp": 7.5}\n'


@pytest.mark.parametrize(
    "line",
    [
        '{"nonfinite": 3, "loss": 1}',
        '{"nonfinite": {"loss": "x"}}',
        '{"a": 1' + "0" * 400 + "}",
        '{"timestamp": NaN, "a": 1}',
        '{"timestamp": "noon", "a": 1}',
        '{"a": [1]}',
        "[" * 100_000,
        "no json",
        "[1]",
        "\udcff",
    ],
)
def test_a_line_that_is_no_record_is_in_nobodys_way(tmp_path: Path, line: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes((GOOD + line + "\n" + GOOD).encode("utf-8", "surrogateescape"))
    first, odd, last = read_all(path)
    assert first.values == last.values == {"loss": 0.5}
    assert (odd.index, odd.values, odd.texts) == (1, {}, {})
    assert (odd.epoch, odd.iteration, odd.timestamp) == (0, 10, 0.0)


def test_speed_has_its_own_place_and_objects_their_mode(tmp_path: Path) -> None:
    speed = {"eta": 1.0, "time": 0.1, "data_time": 0.2, "samples_per_second": 640.0, "memory": 3.0}
    log = RecordLog(tmp_path / "m.jsonl")
    log.append({"mode": "train", "epoch": 1, "iteration": 1, **speed, "loss": 2.0})
    shows = {"kind": "image", "name": "predictions", "path": "media/a.png"}
    log.append({"mode": "val", "epoch": 1, "iteration": 1, "time": 5.0, "objects": [shows]})
    log.close()
    train, val = read_all(tmp_path / "m.jsonl")
    assert train.metrics == {**{f"perf/{name}": value for name, value in speed.items()}, "train/loss": 2.0}
    assert val.metrics == {"val/time": 5.0}, "a metric of the user's"
    assert val.objects == (LoggedObject("image", "val/predictions", "media/a.png"),)
    assert val.texts == {}


@pytest.mark.parametrize(
    "objects",
    ['"x"', '["x"]', '[{"kind": "image", "name": "a"}]', '[{"kind": "film", "name": "a", "path": "a"}]']
    + [f'[{{"kind": "image", "name": "a", "path": "{path}"}}]' for path in ("/etc/passwd", "../a", "a/../../b")],
)
def test_a_record_with_an_object_that_is_none_is_ignored(
    tmp_path: Path, objects: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = _log(tmp_path / "m.jsonl", f'{{"objects": {objects}, "a": 1}}\n')
    (record,) = read_all(path)
    assert (record.objects, record.values) == ((), {})
    assert "line 1 is not a record" in caplog.text


def test_evenly_spread_records_of_each_kind_are_read(tmp_path: Path) -> None:
    """A reader of every second line would only see the losses, or only the norms."""
    log = RecordLog(tmp_path / "m.jsonl")
    for number in range(1000):
        log.append({"mode": "train", "epoch": 1, "iteration": number, "loss": 0.5})
        log.append({"mode": "train", "epoch": 1, "iteration": number, "weight_norm": 2.0})
        if number % 500 == 7:
            log.append({"mode": "val", "epoch": 1, "iteration": number, "loss": 0.7})
    log.close()
    with (tmp_path / "m.jsonl").open("ab") as file:
        file.write(b'{"mode": "val", "iter')
    records = read_some(tmp_path / "m.jsonl", 10)
    found: dict[str, list[int]] = {}
    for record in records:
        found.setdefault(next(iter(record.metrics)), []).append(record.iteration)
    spread = [*range(0, 1000, 128), 999]
    assert found == {"train/loss": spread, "train/weight_norm": spread, "val/loss": [7, 507]}
    assert read_some(tmp_path / "none.jsonl", 10) == []


def test_damaged_lines_are_left_out_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = ['{"mode": "train", "iteration": 1}', "\0" * 30, '{"mode": "train", "iteration"; 3}', '{"iteration": 4}']
    (tmp_path / "m.jsonl").write_text("".join(f"{line}\n" for line in lines))
    assert [record.iteration for record in read_some(tmp_path / "m.jsonl", 10)] == [1, 4]
    assert [record.getMessage()[:41] for record in caplog.records] == ["m.jsonl, line 2 is not a record and is ig"]
    assert [record.is_damaged for record in read_all(tmp_path / "m.jsonl")] == [False, True, True, False]
