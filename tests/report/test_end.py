"""`hooks=report` and `sweep.report=true` write the page when training ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydraloop.tracking import report_process
from tests.e2e.projects import Project
from tests.report.written import Page


@pytest.mark.slow
def test_a_run_and_a_sweep_write_their_reports(tmp_path: Path) -> None:
    project = Project.make(tmp_path / "project")
    done = project.train("hooks=visualization,report", "engine.max_epochs=2", "hydra.run.dir=run")
    assert done.code == 0, done.text
    assert "report: run/report.html" in done.text.replace(f"{project.path}/", "")
    page = Page(project.path / "run" / "report.html")
    assert "finished" in page.text
    assert page.captions[-2:] == ["val/predictions", "test/predictions"]
    assert "hooks=[visualization,report]" in page.text
    short = ("seed=0,1", "engine.max_iters=2", "sweep.report=true", "hydra.sweep.dir=sweep")
    done = project.train("-m", *short)
    assert done.code == 0, done.text
    assert "sweep/report.html" in done.text.splitlines()[-1]
    assert "This sweep" not in Page(project.path / "sweep" / "report.html").text


def test_a_report_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    report_process.write_report(tmp_path)
    assert "the report cannot be written: error: directory:" in caplog.text
