"""What a task of an array starts, and when it ends; its jobs are played."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydraloop.run_files.lock import RunLock
from hydraloop.sweeps import queue, states
from hydraloop.sweeps.executors.executor import Request
from hydraloop.sweeps.executors.gpus import Shares
from hydraloop.sweeps.slurm.array_task import ArrayTask
from hydraloop.sweeps.slurm.arrays import Task
from hydraloop.sweeps.source import Grid
from hydraloop.sweeps.states import JobState
from hydraloop.sweeps.sweep_directory import SweepDirectory
from tests.sweeps.test_controller import DESCRIPTION, Played, Seen, finish

NOW = 1000.0


@pytest.fixture
def directory(tmp_path: Path) -> SweepDirectory:
    return SweepDirectory.create(tmp_path / "sweep", DESCRIPTION)


def task(directory: SweepDirectory, restarts: int = 0, **options: float) -> tuple[ArrayTask, Played]:
    executor, told = Played(directory, finish), Task((), submitted=NOW, restarts=restarts)
    grid = Grid(dict(enumerate(directory.description.jobs.listed)))
    return ArrayTask(directory, executor, grid, Shares(1), Seen(), task=told, **options), executor  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reason", "ended", "restarts", "starts"),
    [
        ("preempted by SIGTERM", NOW + 1, 0, False),
        ("preempted by SIGTERM", NOW + 1, 1, True),
        ("killed by SIGKILL (out of memory?)", NOW + 1, 0, False),
        (queue.UNREPORTED, NOW + 1, 0, True),
        ("preempted by SIGTERM", NOW - 1, 0, True),
    ],
    ids=["scancel", "the time limit", "out of memory", "its task was killed", "before the submission"],
)
def test_a_job_that_was_interrupted_starts_again_after(
    directory: SweepDirectory, reason: str, ended: float, restarts: int, starts: bool
) -> None:
    before = JobState(0, "interrupted", attempts=1, reason=reason, ended=ended, directory="0")
    directory.folder(0).mkdir()
    states.write(directory.folder(0), before, flush=False)
    loop, played = task(directory, restarts)
    loop.run()
    assert played.started == [0, 1, 2, 3, 4, 5][not starts :]
    assert loop.code == 0, "another task's job"


def test_a_job_that_another_task_has_lost_meanwhile_is_left(directory: SweepDirectory) -> None:
    lost = JobState(1, "interrupted", attempts=1, reason="killed by SIGKILL", ended=NOW + 1, directory="1")

    def play(played: Played, request: Request) -> int:
        directory.folder(1).mkdir(exist_ok=True)
        states.write(directory.folder(1), lost, flush=False)
        return finish(played, request)

    loop, played = task(directory)
    played.play = play
    loop.run()
    assert played.started == [0, 2, 3, 4, 5]
    assert loop.left == [1]


def test_a_task_ends_while_others_run_and_knows_their_ends(directory: SweepDirectory) -> None:
    running = JobState(5, "running", attempts=1, controller="other", directory="5")
    with RunLock(directory.folder(5), key="sweep"):
        states.write(directory.folder(5), running, flush=False)
        loop, played = task(directory)
        loop.run()
        assert played.started == [0, 1, 2, 3, 4]
        assert loop.left == [5]
    finish(played, Request(5, (), ""))
    assert loop.left == []


def test_no_job_begins_that_would_not_end_before_the_time_limit(directory: SweepDirectory) -> None:
    def long(played: Played, request: Request) -> int:
        state = JobState(request.number, "finished", attempts=1, controller=request.controller, seconds=60.0)
        directory.folder(request.number).mkdir()
        states.write(directory.folder(request.number), state, flush=False)
        return 0

    loop, played = task(directory, limit=100.0)
    played.play = long
    loop._began -= 50.0
    loop.run()
    assert played.started == [0]
