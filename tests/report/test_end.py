"""`sweep.report=true` writes the page when the sweep ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydraloop.commands import report
from tests.e2e.projects import Project
from tests.report.written import Page


@pytest.mark.slow
def test_a_sweep_writes_its_report(tmp_path: Path) -> None:
    project = Project.make(tmp_path / "project")
    short = ("seed=0,1", "engine.max_iters=2", "sweep.report=true", "hydra.sweep.dir=sweep")
    done = project.train("-m", *short)
    assert done.code == 0, done.text
    assert "sweep/report.html" in done.text.splitlines()[-1]
    assert '</h1><span class="badge finished">' in Page(project.path / "sweep" / "report.html").body


def test_a_report_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    report.write_report(tmp_path)
    assert "the report cannot be written: " in caplog.text
