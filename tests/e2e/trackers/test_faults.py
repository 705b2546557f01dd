"""Real faults: a follower that is stopped, a full disk."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.projects import Done, Project, Run
from tests.e2e.trackers.tracked import MLflowRun, mlflow_run, mlflow_runs, points

HOOKS = '''
from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import torch

from hydraloop import Hook


class Pictures(Hook):
    """Logs a small picture in each of the first iterations."""

    def __init__(self, *, number: int) -> None:
        self.number = number

    def after_train_iter(self, engine, batch_idx, batch, outputs) -> None:
        if engine.progress.iteration <= self.number:
            engine.log_image("dots", torch.rand(16, 16))


class Until(Hook):
    """Ends training when there is a file `stop`."""

    def after_train_iter(self, engine, batch_idx, batch, outputs) -> None:
        time.sleep(0.02)
        if Path("stop").exists():
            engine.request_stop("there is a file")


class Disk(Hook):
    """Fills a disk after some iterations, and frees it after some more."""

    def __init__(self, *, file: str, full: int, free: int) -> None:
        self.file, self.full, self.free = Path(file), full, free

    def after_train_iter(self, engine, batch_idx, batch, outputs) -> None:
        if engine.progress.iteration == self.full:
            with suppress(OSError), self.file.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        if engine.progress.iteration == self.free:
            self.file.unlink()
'''
PICTURES = ("+hooks.pictures._target_=my_project.faults.Pictures", "+hooks.pictures.number=100")
UNTIL = ("+hooks.until._target_=my_project.faults.Until", "engine.max_epochs=10000")
LONG = ("default_hooks.logger.interval=1", "default_hooks.checkpoint=null", "hooks.mlflow.system_metrics=false")
"""A record in each iteration, and no large files."""
SOON = 120.0
"""Seconds within which anything that is waited for happens, on a busy machine."""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project.make(tmp_path / "project")
    made.write("my_project/faults.py", HOOKS)
    return made


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this system does not allow mounts: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def sync(project: Project, *options: str, **environment: str) -> Done:
    return project.python("-m", "hydraloop", "sync", str(project.run.path), *options, **environment)


def assert_whole(found: MLflowRun, run: Run) -> None:
    """Each record arrived once, and the status says how the run ended."""
    assert found.status == "FINISHED"
    assert {name: line for name, line in found.points.items() if not name.startswith("best/")} == points(run)


def until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@contextmanager
def training(project: Project, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A training that has records in `mlflow.db`, until there is a file `stop`. It is killed at the end if it runs."""
    process = project.start("hooks=[mlflow]", *LONG, *UNTIL, *options)
    try:
        until(lambda: (project.path / "mlflow.db").exists(), "the database is there")
        until(lambda: any(run.points for run in mlflow_runs(project.path)), "records have arrived")
        yield process
    finally:
        process.kill()
        process.communicate()


# A follower that hangs. ---------------------------------------------------------------------


@pytest.mark.slow
def test_a_follower_that_is_stopped_does_not_delay_the_run(project: Project) -> None:
    with training(project, "hooks.mlflow.flush_timeout=3") as process:
        children = psutil.Process(process.pid).children(recursive=True)
        (follower,) = (one for one in children if "hydraloop.tracking" in " ".join(one.cmdline()))
        follower.send_signal(signal.SIGSTOP)
        project.write("stop", "")
        run = project.run
        until(lambda: (run.path / "result.json").exists(), "training ends")
        ended = time.monotonic()
        output, _ = process.communicate(timeout=SOON)
        took = time.monotonic() - ended
    assert process.returncode == 0, output
    assert took < 3 + 5, "flush_timeout, and some seconds to exit"
    assert not follower.is_running()
    assert "sends the rest" in output
    done = sync(project)
    assert done.code == 0, done.text
    assert_whole(mlflow_run(project.path), run)


# A disk that is full. ------------------------------------------------------------------------------------------------


def on_a_full_disk(project: Project, disk: Path, *, full: int, free: int, flush_timeout: int) -> Done:
    """Train 300 iterations with a run directory on a disk that is full between two of them."""
    filling = ["+hooks.disk._target_=my_project.faults.Disk", f"+hooks.disk.file={disk / 'filler'}"]
    filling += [f"+hooks.disk.full={full}", f"+hooks.disk.free={free}", "+hooks.pictures.on_error=warn"]
    usual = [
        *LONG,
        "engine.max_epochs=15",
        f"hooks.mlflow.flush_timeout={flush_timeout}",
        f"hydra.run.dir={disk / 'run'}",
    ]
    return project.train("hooks=[mlflow]", *usual, *PICTURES, *filling)


def lines_about(done: Done) -> list[str]:
    """What was printed except for the records and the texts at the begin and the end of the run."""
    table = re.compile(r"(train|val|test) +\d+/\d+ ")
    _, *after = re.split(r"^ +epoch +iter .*$", done.text, maxsplit=1, flags=re.M)
    return [line for line in after[0].splitlines() if not table.match(line)]


@pytest.mark.slow
def test_a_disk_that_is_full_for_a_while_loses_no_record(project: Project, small_disk: Path) -> None:
    done = on_a_full_disk(project, small_disk, full=20, free=200, flush_timeout=60)
    assert done.code == 0, done.text
    run = Run(small_disk / "run")
    train = [record["iteration"] for record in run.records if record["mode"] == "train" and "loss" in record]
    assert train == [*range(1, 301)], "each once, in order"
    assert_whole(mlflow_run(project.path), run)
    assert done.text.count("metrics.jsonl cannot be written: OSError: [Errno 28] No space left on device") == 1
    assert done.text.count("train.log cannot be written") == 1
    assert done.text.count("hook pictures failed at") == 1
    assert re.search(r"pictures: 7\d more errors of this kind: OSError: \[Errno 28\] No space left", done.text)
    assert "lacks" not in done.text
    assert len(lines_about(done)) < 80, done.text


@pytest.mark.slow
def test_a_disk_that_stays_full_is_reported_and_sync_sends_what_was_written(project: Project, small_disk: Path) -> None:
    done = on_a_full_disk(project, small_disk, full=100, free=1000, flush_timeout=3)
    assert done.code == 1
    assert re.search(r"metrics.jsonl lacks \d+ records of the iterations \d+ to 300: OSError", done.text)
    assert "result.json cannot be written" in done.text
    assert done.text.count("Traceback") <= 3
    assert len(lines_about(done)) < 150, done.text
    (small_disk / "filler").unlink()
    run = Run(small_disk / "run")
    assert len(run.records) > 90, "all lines are whole"
    synced = project.python("-m", "hydraloop", "sync", str(run.path))
    assert synced.code == 0, synced.text
    found = mlflow_run(project.path)
    assert {name: line for name, line in found.points.items() if not name.startswith("best/")} == points(run)
