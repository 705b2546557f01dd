"""The losses of a run as lines of blocks."""

from __future__ import annotations

import io
import math
import sys
from pathlib import Path

import pytest

from hydraloop.engine.report.sparkline import losses
from hydraloop.run_files.record_writer import RecordLog


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """The losses of a run fall, with a NaN."""
    writer = RecordLog(tmp_path / "metrics.jsonl")
    for number in range(1, 9):
        writer.append({"mode": "train", "iteration": number, "loss": math.nan if number == 4 else 8.0 - number})
    for number in (4, 8):
        writer.append({"mode": "val", "iteration": number, "loss": float(number), "accuracy": 0.5})
    writer.append({"mode": "test", "iteration": 8, "loss": 100.0})
    writer.close()
    return tmp_path / "metrics.jsonl"


def test_both_losses_have_the_same_scale(log: Path) -> None:
    assert losses(log).splitlines() == ["▇▆▅ ▄▃▂▁ train, 7.000 to 0.0", "▅█ val, 4.000 to 8.000"]
    assert losses(log.parent / "none.jsonl") == ""


def test_a_long_run_fits_into_the_line(tmp_path: Path) -> None:
    writer = RecordLog(tmp_path / "metrics.jsonl")
    for number in range(1000):
        writer.append({"mode": "train", "iteration": number, "loss": 1.0})
    writer.close()
    assert 20 <= len(losses(tmp_path / "metrics.jsonl").partition(" ")[0]) <= 40


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_that_cannot_show_blocks_gets_none(
    log: Path, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    assert losses(log) == ""
