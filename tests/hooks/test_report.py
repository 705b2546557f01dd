"""The hook that writes the report. `tests/report/test_end.py` has a real run."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydraloop.errors import UserError
from hydraloop.hooks import report
from hydraloop.run_files.result import Result
from hydraloop.tracking import report_process
from tests.helpers import failing, make_engine


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, str]]:
    """The directories of which a report is written, with the status of the run at that time."""
    found: list[tuple[Path, str]] = []

    def write(run_dir: Path) -> None:
        result = Result.read(run_dir)
        assert result is not None, "the report has the result"
        found.append((run_dir, result.status))

    monkeypatch.setattr(report, "write_report", write)
    return found


def test_a_finished_run_and_a_failed_run_have_a_report(tmp_path: Path, written: list[tuple[Path, str]]) -> None:
    make_engine(tmp_path / "a", {"report": report.ReportHook()}).train()
    engine = make_engine(tmp_path / "b", {"report": report.ReportHook(), "fails": failing("after_train_iter")})
    with pytest.raises(RuntimeError):
        engine.train()
    assert written == [(tmp_path / "a", "finished"), (tmp_path / "b", "failed")]


def test_a_run_that_is_interrupted_has_none(tmp_path: Path, written: list[tuple[Path, str]]) -> None:
    interrupts = failing("after_train_iter", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        make_engine(tmp_path, {"report": report.ReportHook(), "interrupts": interrupts}).train()
    assert written == []


def test_without_plotly_the_hook_is_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_process, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="plotly"):
        report.ReportHook()
