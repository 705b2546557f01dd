"""One run directory, several processes: one trains there; the others name it and change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hydraloop.files import lock
from tests.e2e.projects import Project, Run
from tests.e2e.warm import Script
from tests.processes import PATIENCE, until

ENDLESS = ("experiment=spirals", "engine.max_epochs=1000000", "default_hooks.checkpoint.interval=1000000",
           "default_hooks.checkpoint.save_begin=2", "+hooks.idle._target_=my_project.idle.Idle")  # fmt: skip
"""A run of hours that writes one checkpoint, after its second epoch."""
IDLE = """
import time

from hydraloop import Hook


class Idle(Hook):
    def before_train_iter(self, engine, batch_idx, batch):
        if engine.progress.epoch >= 2:  # the processor is for the processes that the test starts meanwhile
            time.sleep(0.1)
"""
QUICK = ("experiment=spirals", "engine.max_epochs=2", "engine.test=false")
SCRIPT = """
import sys
from pathlib import Path

import hydraloop

hydraloop.build(hydraloop.compose(sys.argv[1:]), run_dir=Path("mine")).train()
"""


@pytest.fixture
def project(project: Project) -> Project:
    """A user's project with the hook above."""
    project.write("my_project/idle.py", IDLE)
    return project


def training(project: Project, *arguments: str) -> Script:
    """Start an endless run in `mine`; return when it has a checkpoint."""
    process = project.begin(*ENDLESS, "hydra.run.dir=mine", *arguments)
    last = project.path / "mine" / "checkpoints" / "last_checkpoint"
    try:
        until(last.exists, "it has a checkpoint", process=process)
    except BaseException:
        end(process)
        raise
    return process


@pytest.fixture
def running(project: Project) -> Iterator[Script]:
    process = training(project)
    yield process
    end(process)


def end(process: Script) -> None:
    process.kill()
    process.communicate()


def names(folder: Path) -> set[str]:
    """Return the files in a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_the_second_process_says_who_trains_and_changes_nothing(project: Project, running: Script) -> None:
    before = names(project.path / "mine")
    for resume in ("mine", "auto"):
        line = ["hydra.run.dir=mine"] if resume == "auto" else []
        done = project.train("experiment=spirals", f"resume={resume}", *line)
        assert done.code == 2, done.text
        assert done.err.startswith(f"error: resume: process {running.pid} on "), done.err
        assert done.err.count("is training in") == 1
        assert f"kill {running.pid}" in done.err
        assert done.out == ""
    done = project.train(*QUICK, "hydra.run.dir=mine")
    assert done.code == 2
    assert done.err.startswith(f"error: hydra.run.dir: process {running.pid} on "), done.err
    project.write("own.py", SCRIPT)
    done = project.python("own.py", *QUICK, "resume=mine")
    assert done.code == 1
    assert f"UserError: resume: process {running.pid} on " in done.err, done.err
    assert names(project.path / "mine") == before
    assert running.poll() is None

    end(running)
    done = project.train("experiment=spirals", "resume=mine", "engine.max_iters=1", "engine.test=false")
    assert done.code == 0, done.text
    assert lock.holder(project.path / "mine") is None


@pytest.mark.slow
def test_of_two_first_starts_in_one_directory_one_trains(project: Project) -> None:
    starts = [project.begin(*QUICK, "hydra.run.dir=mine") for _ in range(2)]
    outputs = [process.communicate(timeout=PATIENCE)[0] for process in starts]
    codes = [process.returncode for process in starts]
    assert sorted(codes) == [0, 2], outputs
    refused = outputs[codes.index(2)]
    assert refused.count("error: ") == 1
    assert f"process {starts[codes.index(0)].pid} on " in refused or "holds a run already" in refused
    records = Run(project.path / "mine").records
    keys = [(record["mode"], record["iteration"]) for record in records]
    assert len(keys) == len(set(keys))
    assert lock.holder(project.path / "mine") is None


@pytest.mark.slow
def test_a_jobs_directory_is_locked_while_its_sweep_runs(project: Project) -> None:
    sweep = project.begin("-m", *ENDLESS, "seed=1,2", "hydra.sweep.dir=all")
    try:
        until(lambda: list(project.path.glob("all/0/checkpoints/last_checkpoint")), "the first job has a checkpoint")
        held = lock.holder(project.path / "all/0")
        assert held is not None
        for line, said in (
            (["resume=all/0"], f"process {held.pid} on "),
            (["-m", "seed=1,2", "hydra.sweep.dir=all"], "hydra.sweep.dir: all holds a sweep already\n"),
        ):
            done = project.train("experiment=spirals", *line)
            assert done.code == 2, done.text
            assert said in done.err
        assert not (project.path / "all/0/.hydra/resume_1").exists()
        assert not (project.path / "all/1").exists()
    finally:
        end(sweep)


def test_training_from_python_holds_the_lock(project: Project) -> None:
    project.write("own.py", SCRIPT)
    process = project.begin(*ENDLESS, script="own.py")
    try:
        until(lambda: (project.path / "mine/checkpoints/last_checkpoint").exists(), "it has a checkpoint")
        done = project.train("experiment=spirals", "resume=mine")
        assert done.code == 2, done.text
        assert f"process {process.pid} on " in done.err
    finally:
        end(process)


@pytest.mark.slow
def test_ranks_and_their_restarts_are_not_locked_out_and_others_are(project: Project) -> None:
    process = training(project, "distributed.nproc_per_node=2")
    held = lock.holder(project.path / "mine")
    assert held is not None
    assert psutil.Process(held.pid).ppid() == process.pid, "rank 0 has the lock"
    done = project.train("experiment=spirals", "resume=mine")
    assert done.code == 2, done.text
    assert f"process {held.pid} on " in done.err
    end(process)  # the ranks end soon after it and hold a lock until then
    line = ["experiment=spirals", "resume=mine", "engine.max_iters=1", "engine.test=false"]
    until(lambda: project.train(*line).code == 0, "the lock is free again")
