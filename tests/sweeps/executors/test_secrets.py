"""Secrets of jobs that are new processes: no file below the directory of the sweep ever has one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.projects import Project
from tests.marks import nightly, slow

SECRET = "hunter2-0123456789"
SCAN = f"""
import json, os
from pathlib import Path

from hydraloop import Hook


def scan(when: str) -> None:
    files = [path for path in Path("all").rglob("*") if path.is_file()]
    found = [str(path) for path in files if b"{SECRET}" in path.read_bytes()]
    Path("seen").mkdir(exist_ok=True)
    Path("seen", f"{{when}}-{{os.getpid()}}").write_text(json.dumps([found, [path.name for path in files]]))


class Scan(Hook):
    def __init__(self, api_key: str, password: str) -> None:
        self.given = [api_key, password, os.environ["MY_TOKEN"]]

    def before_train(self, engine: object) -> None:
        assert self.given == ["{SECRET}", "{SECRET}-env", "{SECRET}-set"]
        scan("running")
"""
THREAD = "import threading, time; threading.Thread(target=time.sleep, args=[3600], daemon=True).start()"
"""A program with a thread is not forked."""
TRAIN = """
import os
from my_project.scan import scan

if "HYDRALOOP_SWEEP_JOB" in os.environ:
    scan("queued")

import hydraloop

if __name__ == "__main__":
    hydraloop.main()
"""


@pytest.mark.parametrize("forks", [nightly(True), slow(False)])
def test_no_file_of_a_sweep_ever_has_a_secret(tmp_path: Path, forks: bool) -> None:
    project = Project.make(tmp_path / "project")
    project.write("my_project/scan.py", SCAN)
    project.write("train.py", TRAIN if forks else f"{THREAD}\n{TRAIN}")
    done = project.train(
        *("-m", "seed=1,2", "experiment=spirals", "engine.max_iters=2", "sweep.max_workers=1", "hydra.sweep.dir=all"),
        "+hooks.scan._target_=my_project.scan.Scan",
        f"+hooks.scan.api_key={SECRET}",
        "+hooks.scan.password=${oc.env:ELSEWHERE}",
        f"++hydra.job.env_set.MY_TOKEN={SECRET}-set",
        ELSEWHERE=f"{SECRET}-env",
    )
    assert done.code == 0, done.text
    seen = {path.name: json.loads(path.read_text()) for path in (project.path / "seen").iterdir()}
    spawned = [] if forks else ["queued", "queued"]  # forks do not run train.py
    assert sorted(name.partition("-")[0] for name in seen) == [*spawned, "running", "running"]
    assert [found for found, _ in seen.values() if found] == []
    has_request = ["request.json" in files for name, (_, files) in seen.items() if name.startswith("queued")]
    assert has_request == [True] * len(spawned)
    ended = [path for path in (project.path / "all").rglob("*") if path.is_file()]
    assert [path for path in ended if SECRET.encode() in path.read_bytes()] == []
    assert "request.json" not in [path.name for path in ended]
