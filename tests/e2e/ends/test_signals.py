"""Signals before training, and to a run that has finished: what the exit code and `result.json` say."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.e2e.projects import Done, Project, Run
from tests.marks import nightly, slow

HOOK = '''
from __future__ import annotations

import os
import time

from hydraloop import Hook

RANK = int(os.environ.get("RANK", 0))
if os.environ.get("SENDS", "") == f"import {RANK}":
    os.kill(os.getpid(), int(os.environ["NUMBER"]))


class Sends(Hook):
    """Sends a signal to the own process at a mount point, or to the process that has started it."""

    priority = 10

    def before_run(self, engine) -> None:
        self.reached("before_run")

    def before_train_epoch(self, engine) -> None:
        self.reached("before_train_epoch")

    def after_run(self, engine) -> None:
        self.reached("after_run")

    def reached(self, point) -> None:
        if os.environ["SENDS"] == f"{point} {RANK}":
            os.kill(os.getpid(), int(os.environ["NUMBER"]))
        if os.environ["SENDS"] == f"{point} launcher":
            if RANK == 0:
                os.kill(os.getppid(), int(os.environ["NUMBER"]))
            time.sleep(60)
'''
LINE = (
    "experiment=spirals",
    "engine.max_epochs=1",
    "engine.test=false",
    "+hooks.sends._target_=my_project.sends.Sends",
)
TERM, HUP, INT, USR1 = signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A user's project with the hook above."""
    made = Project.make(tmp_path / "project")
    made.write("my_project/sends.py", HOOK)
    return made


def run(project: Project, number: int, sends: str, ranks: int = 2, *more: str) -> Done:
    """Train on one or two ranks, one of which sends a signal."""
    line = [*LINE, f"distributed.nproc_per_node={ranks}", *more]
    return project.train(*line, SENDS=sends, NUMBER=str(int(number)))


def outcome(project: Project) -> tuple[str, str | None]:
    result = project.run.result
    return result["status"], result["error"]


def said(number: int) -> str:
    return f"interrupted by {'Ctrl-C (SIGINT)' if number == INT else signal.Signals(number).name}"


@pytest.mark.parametrize(
    ("ranks", "sends", "number"),
    [
        (1, "0", TERM),
        nightly(1, "0", INT),
        nightly(1, "0", HUP),
        nightly(2, "0", TERM),
        nightly(2, "0", USR1),
        nightly(2, "1", HUP),
        nightly(2, "1", USR1),
        slow(2, "launcher", INT),
    ],
)
def test_a_signal_in_after_run_does_not_change_a_finished_result(
    ranks: int, sends: str, number: int, project: Project
) -> None:
    done = run(project, number, f"after_run {sends}", ranks)
    assert outcome(project) == ("finished", None)
    assert done.code == 128 + number, done.text
    assert said(number) in done.text
    assert "error" not in done.text


@pytest.mark.slow
def test_a_resumed_run_that_has_nothing_to_train_keeps_its_result_too(project: Project) -> None:
    """After a failure before the first iteration, the earlier result would be restored."""
    assert run(project, TERM, "", 1).code == 0
    earlier = project.run.result
    assert run(project, TERM, "after_run 0", 1, "resume=auto").code == 143
    assert outcome(project) == ("finished", None)
    assert project.run.result["seconds"] != earlier["seconds"]
    assert not (project.run.path / ".hydra/resume_1/result.json").exists()


@pytest.mark.parametrize("rank", [nightly(0), nightly(1)])
def test_under_torchrun_a_signal_to_one_rank_is_an_interrupt(rank: int, project: Project) -> None:
    """The launcher then sends SIGTERM to the other rank."""
    command = ("-m", "torch.distributed.run", "--nproc-per-node=2", "train.py", *LINE)
    done = project.python(*command, SENDS=f"before_run {rank}", NUMBER=str(int(HUP)))
    assert outcome(project) == ("interrupted", said(HUP)), done.text
    done = project.python(*command, "hydra.run.dir=late", SENDS=f"after_run {rank}", NUMBER=str(int(HUP)))
    assert Run(project.path / "late").result["status"] == "finished", done.text


@pytest.mark.parametrize(
    ("sends", "number"),
    [
        slow("import 1", HUP),
        nightly("before_run 1", USR1),
        nightly("before_train_epoch 1", HUP),  # it does not preempt
        nightly("import 0", TERM),
        nightly("import 1", USR1),
        nightly("before_run 0", INT),
        nightly("before_run 1", TERM),
    ],
)
def test_a_signal_to_one_rank_ends_a_job_like_one_to_the_launcher(sends: str, number: int, project: Project) -> None:
    done = run(project, number, sends)
    assert outcome(project) == ("interrupted", said(number)), done.text
    assert done.code == 128 + number, done.text
    assert "error" not in done.text
