"""Aim, a service that hydraloop does not know, with a custom tracker."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hydraloop.files.metrics_log import FILENAME, read_all
from tests.e2e.projects import Project

pytest.importorskip("aim", reason="Aim is not installed: pip install aim")
TRACKER = (Path(__file__).parent / "aim_tracker.py").read_text(encoding="utf-8")
READ = """
import json, sys
from aim.sdk.run import Run
run = Run(sys.argv[1], repo=".", system_tracking_interval=None, capture_terminal_logs=False, log_system_params=False)
points = {m.name: sorted((step, value[0]) for step, value in m.data.items()) for m in run.metrics()}
print(json.dumps({"points": points, "status": run["status"], "params": run["params"], "name": run.name}))
"""


def _stored(project: Project, run_dir: Path) -> dict[str, Any]:
    cursor = json.loads((run_dir / "tracking" / "aim.cursor.json").read_text())
    done = subprocess.run(
        [sys.executable, "-c", READ, cursor["memory"]["hash"]], cwd=project.path, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_aim_has_the_run_and_its_resume(tmp_path: Path) -> None:
    project = Project.make(tmp_path / "project")
    project.write("my_project/aim_tracker.py", TRACKER)
    hook = ["+hooks.aim._target_=my_project.aim_tracker.Aim", "+hooks.aim.flush_timeout=60"]
    done = project.train(*hook, "engine.max_epochs=1")
    assert done.code == 0, done.text
    run_dir = project.run.path
    resumed = project.train(*hook, "engine.max_epochs=2", f"resume={run_dir}")
    assert resumed.code == 0, resumed.text
    expected: dict[str, dict[int, float]] = {}
    for record in read_all(run_dir / FILENAME):
        for name, value in record.metrics.items():
            expected.setdefault(name, {})[record.iteration] = value
    stored = _stored(project, run_dir)
    assert stored["points"].keys() == expected.keys()
    for name, points in expected.items():
        found = dict(stored["points"][name])
        assert found.keys() >= points.keys(), "also points of records that the resume has cut"
        assert all(math.isclose(found[step], value, rel_tol=1e-6) for step, value in points.items()), name
    assert (stored["status"], stored["params"]["optimizer.lr"]) == ("finished", 0.001)
