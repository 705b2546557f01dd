"""PoolExecutor: processes of jobs from a fork server. The checks are in `pool_program`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from hydraloop.sweeps.executors.executor import Ended, Request
from hydraloop.sweeps.executors.pool import PoolExecutor
from hydraloop.sweeps.sweep_directory import SweepDirectory
from tests.e2e.projects import Project

PROGRAM = Path(__file__).with_name("pool_program.py")
CHECKS = PROGRAM.read_text(encoding="utf-8").split("CHECKS = [")[1].split("]")[0].replace(",", "").split()


def run(*arguments: str) -> dict[str, str]:
    """Return the error of each check that failed."""
    done = subprocess.run([sys.executable, str(PROGRAM), *arguments], capture_output=True, text=True, timeout=120)
    assert done.stdout, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run(str(tmp_path_factory.mktemp("pool")))


@pytest.mark.parametrize("name", CHECKS)
def test_that(name: str, errors: dict[str, str]) -> None:
    assert name not in errors, errors[name]


@pytest.mark.slow
def test_slow_checks(tmp_path: Path) -> None:
    assert run(str(tmp_path), "slow") == {}


def spawns(caplog: pytest.LogCaptureFixture, reason: str) -> None:
    executor = PoolExecutor(SimpleNamespace(), lambda request: subprocess.Popen(["true"]))  # type: ignore[arg-type]  # stand-ins
    executor.submit(Request(0, (), "", ""))
    assert executor.poll(10) == [Ended(0, 0)]
    assert re.search(f"{reason}: each job is a new Python process", caplog.text)


def test_a_program_with_threads_spawns_its_jobs_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait, name="mine")
    thread.start()
    try:
        spawns(caplog, r"has started threads \(.*mine.*\)")
    finally:
        over.set()
        thread.join()


def test_jobs_are_spawned_on_macos(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    spawns(caplog, "libraries of macOS do not survive a fork")


@pytest.mark.nightly
def test_two_jobs_at_a_time_with_two_ranks_each_and_one_that_fails(tmp_path: Path) -> None:
    project = Project.make(tmp_path / "project")
    options = ["distributed.nproc_per_node=2", "sweep.max_workers=2", "engine.max_iters=2", "hydra.sweep.dir=all"]
    done = project.train("-m", "experiment=spirals", "optimizer.lr=1e-2,-1,3e-2", *options)
    assert done.code == 1
    assert "1 of 3 jobs failed" in done.err.splitlines()[-1], done.err
    found = SweepDirectory.load(project.path / "all").states()
    assert [(state.state, state.step) for state in found] == [("finished", 2), ("failed", None), ("finished", 2)]
    for number in (0, 2):
        assert (project.path / "all" / str(number) / "rank1.log").exists()


PREEMPTING = """
from hydraloop import Hook

class Preempting(Hook):
    def __init__(self):
        self.done = 0

    def after_train_iter(self, engine, batch_idx, batch, outputs):
        self.done += 1
        if self.done == 10:
            engine.requests.preempt("a test", agreed=True)
"""


@pytest.mark.slow
def test_a_job_continues_after_each_preemption(tmp_path: Path) -> None:
    """That is not a retry, of which none is allowed."""
    project = Project.make(tmp_path / "project")
    project.write("my_project/preempting.py", PREEMPTING)
    options = ["+hooks.preempting._target_=my_project.preempting.Preempting", "hydra.sweep.dir=all"]
    done = project.train("-m", "experiment=spirals", "engine.max_iters=25", *options)
    assert done.code == 0, done.text
    state = SweepDirectory.load(project.path / "all").state(0)
    assert (state.state, state.iterations, state.attempts) == ("finished", 25, 3)
