"""A run whose disk is full: exit code 75 means that it has saved, and the run continues from its last checkpoint."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.projects import Project, Run
from tests.marks import nightly, slow
from tests.small_disk import small_disk

HOOK = '''
from __future__ import annotations

import os
import pathlib

from hydraloop import Hook


class Fills(Hook):
    """Fills the disk of the run, but for 64 KB, after the checkpoint of an epoch; then sends a signal."""

    priority = 10

    def __init__(self, *, after: int, number: int = 0, only: int | None = None) -> None:
        self.after, self.number, self.only = after, number, only

    def before_train_epoch(self, engine) -> None:
        engine.checkpoints.wait_for_save()
        if engine.progress.epoch != self.after or engine.progress.began_at:
            return
        if engine.distributed.is_main:
            disk = os.statvfs(engine.run_dir)
            (engine.run_dir.parent / "filler").write_bytes(bytes(disk.f_bavail * disk.f_frsize - 2**16))
        engine.distributed.barrier()
        if self.number and self.only in (None, engine.distributed.rank):
            os.kill(os.getpid(), self.number)
'''
SPIRALS = ("experiment=spirals", "engine.max_epochs=2", "engine.test=false", "task.model.width=256")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A user's project with the hook above."""
    made = Project.make(tmp_path / "project")
    made.write("my_project/fills.py", HOOK)
    return made


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    with small_disk(tmp_path / "a small disk", 8) as folder:
        yield folder


def filling(disk: Path, after: int, **options: int) -> list[str]:
    """Return the overrides of a run on the disk, which is full after the checkpoint of an epoch."""
    given = [f"+hooks.fills.{name}={value}" for name, value in {"after": after, **options}.items()]
    return [*SPIRALS, f"hydra.run.dir='{disk}/r'", "+hooks.fills._target_=my_project.fills.Fills", *given]


@pytest.mark.parametrize("number", [slow(signal.SIGTERM), nightly(signal.SIGUSR1), nightly(signal.SIGINT)])
def test_ranks_that_could_not_save_end_as_the_signal_to_one_of_them(number: int, project: Project, disk: Path) -> None:
    done = project.train(*filling(disk, 1, number=number, only=1), "distributed.nproc_per_node=2")
    assert done.code == 128 + number, done.text
    assert done.text.count("could not be written: the end of training is lost") == 1
    result = Run(disk / "r").result
    assert (result["status"], result["error"].partition(" (")[0]) == ("interrupted", f"interrupted by {_name(number)}")


@pytest.mark.parametrize("after", [0, slow(1)])
def test_exit_code_75_means_that_the_run_has_saved(after: int, project: Project, disk: Path) -> None:
    done = project.train(*filling(disk, after, number=signal.SIGTERM))
    assert done.code == 143, done.text
    lost = "iter_16.pth" if after else "iter_1.pth"
    assert f"{lost} could not be written: the end of training is lost" in done.text
    assert "no checkpoint hook" not in done.text
    result = Run(disk / "r").result
    assert (result["status"], result["error"]) == ("interrupted", "interrupted by SIGTERM")
    if after:
        _resume(project, disk)


def test_a_run_that_finishes_on_a_full_disk_fails_and_can_be_resumed(project: Project, disk: Path) -> None:
    done = project.train(*filling(disk, 1))
    assert done.code == 1, done.text
    assert "Make space, and train again from the last checkpoint." in done.text
    assert Run(disk / "r").result["status"] == "failed"
    _resume(project, disk)


def _name(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def _resume(project: Project, disk: Path) -> None:
    """Make space, and resume a run that has saved one epoch."""
    (disk / "filler").unlink()
    done = project.train("resume", str(disk / "r"))
    assert done.code == 0, done.text
    assert Run(disk / "r").result["status"] == "finished"
    assert "resumed at 15" in done.text
