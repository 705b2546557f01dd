"""The table of records: aligned columns, and when the header is repeated."""

from __future__ import annotations

from typing import Any

from hydraloop.engine.record_table import RecordTable

TRAIN: dict[str, Any] = {
    "mode": "train", "epoch": 1, "iteration": 10, "lr": 0.00097, "momentum": 0.9, "eta": 93784.0, "time": 0.0475,
    "data_time": 0.000873, "samples_per_second": 1347.4, "memory": 273.4, "grad_norm": 1.25, "aux_loss": 1e-6,
    "loss": 1.98355,
}  # fmt: skip
VAL: dict[str, Any] = {"mode": "val", "epoch": 1, "iteration": 20, "accuracy": 0.84358, "loss": 1.67617}


def _lines(table: RecordTable, *records: dict[str, Any]) -> list[str]:
    """Everything that is printed, with a note at the end of validations."""
    lines = []
    for record in records:
        lines.append(table.header(record))
        lines.append(table.line(record, "best" if record["mode"] == "val" else ""))
    return [line for line in lines if line is not None]


def test_numbers_are_below_their_header() -> None:
    assert _lines(RecordTable(20, 400, ["accuracy", "loss"]), TRAIN, VAL, {**TRAIN, "iteration": 200}) == [
        "       epoch     iter       lr      eta     time     data  samples/s   memory  grad_norm      loss  aux_loss"
        "  accuracy",
        "train   1/20   10/400  9.7e-04 26:03:04   47.5ms    873µs       1347   273MiB      1.250     1.984 1.000e-06",
        "val     1/20   20/400                                                                        1.676"
        "              0.8436  best",
        "train   1/20  200/400  9.7e-04 26:03:04   47.5ms    873µs       1347   273MiB      1.250     1.984 1.000e-06",
    ]


def test_further_lrs_are_beside_the_first_unless_there_are_many() -> None:
    lrs = {f"lr/{name}": 2e-4 for name in ("generator", "critic.1")}
    header, line = _lines(RecordTable(1, 1), {**TRAIN, **lrs})
    assert header.split()[2:6] == ["lr", "lr/generator", "lr/critic.1", "eta"]
    assert line.split()[3:6] == ["9.7e-04", "2.0e-04", "2.0e-04"]
    assert len(line) == len(header.rstrip()) or line.index("2.0e-04") == header.index("generator") + 2
    many = {f"lr/{index}": 0.1 for index in range(5)}
    assert "lr/" not in _lines(RecordTable(1, 1), {**TRAIN, **many})[0]


def test_the_header_is_repeated_every_20_lines() -> None:
    lines = _lines(RecordTable(20, 400), *[TRAIN] * 45)
    assert [index for index, line in enumerate(lines) if "epoch" in line] == [0, 21, 42]


def test_a_new_column_repeats_the_header_and_counts_again() -> None:
    lines = _lines(RecordTable(20, 400), *[TRAIN] * 3, {**TRAIN, "skipped": 2}, *[TRAIN] * 21)
    assert [index for index, line in enumerate(lines) if "epoch" in line] == [0, 4, 25]
    assert "skipped" not in lines[0]
    assert lines[4].split() == [
        "epoch", "iter", "lr", "eta", "time", "data", "samples/s", "memory", "skipped", "grad_norm", "loss", "aux_loss",
    ]  # fmt: skip
    assert lines[6].index("273MiB") < lines[6].index("1.250")
    assert len(lines[6]) == len(lines[5])


def test_a_negative_number_with_an_exponent_keeps_its_distance() -> None:
    line = _lines(RecordTable(20, 400), {**TRAIN, "loss": -1.2345e-05, "aux_loss": -2.5e9, "grad_norm": 12345678901})[1]
    assert line.split()[-3:] == ["1.23e+10", "-1.23e-05", "-2.50e+09"]


def test_a_metric_may_have_the_name_of_a_measure() -> None:
    table = RecordTable(20, 400, ["time"])
    assert _lines(table, {"mode": "test", "epoch": 20, "iteration": 400, "time": 0.25})[1].split() == [
        "test", "20/20", "400/400", "0.2500",
    ]  # fmt: skip


def test_large_memory_and_values_that_are_not_finite() -> None:
    line = _lines(RecordTable(1, 1), {**TRAIN, "memory": 81920.0, "loss": float("nan")})[1]
    assert "80.0GiB" in line
    assert line.split()[-2] == "nan"


def test_columns_that_do_not_fit_into_the_terminal_are_left_out() -> None:
    table = RecordTable(20, 400, ["accuracy", "recall"], width=80)
    assert _lines(table, TRAIN, {**VAL, "recall": 0.75}, {**TRAIN, "another_scalar": 1.0}) == [
        "       epoch     iter       lr      eta     time      loss  accuracy  …",
        "train   1/20   10/400  9.7e-04 26:03:04   47.5ms     1.984",
        "val     1/20   20/400                                1.676    0.8436  best",
        "train   1/20   10/400  9.7e-04 26:03:04   47.5ms     1.984",
    ]
