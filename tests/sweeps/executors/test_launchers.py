"""Sweeps with launchers of other packages, which pickle the job for another process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.e2e.projects import REPOSITORY, Project
from tests.marks import nightly, slow

LAUNCHERS = Path(sys.prefix) / "launchers"
"""Where scripts/example_packages.sh puts them."""


@pytest.mark.parametrize("launcher", [slow("joblib"), nightly("submitit_local")])
def test_a_launcher_runs_jobs_in_other_processes(tmp_path: Path, launcher: str) -> None:
    if not LAUNCHERS.is_dir():
        pytest.skip("the launchers are not installed")
    project = Project.make(tmp_path / "project")
    project.write("train.py", 'import hydraloop\n\nhydraloop.main(trusted=["hydra_plugins"])\n')
    path = os.pathsep.join(map(str, (LAUNCHERS, REPOSITORY)))
    line = ("-m", f"hydra/launcher={launcher}", "seed=1,2", "experiment=spirals", "engine.max_iters=2")
    done = project.train(*line, PYTHONPATH=path)
    assert done.code == 0, done.text
    assert [job.config.seed for job in project.jobs] == [1, 2]
    assert [job.result["status"] for job in project.jobs] == ["finished", "finished"], done.text
