"""The loop of a sweep, with jobs that are played in this process: starts, ends, retries, signals, other controllers."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from hydraloop.errors import UserError
from hydraloop.run_files.lock import RunLock
from hydraloop.sweeps import states
from hydraloop.sweeps.controller import controller, signals
from hydraloop.sweeps.controller.controller import Controller
from hydraloop.sweeps.executors.executor import LEFT, NOT_RECORDED, Ended, Request
from hydraloop.sweeps.executors.gpus import Shares, Slots
from hydraloop.sweeps.source import Grid, Job, Source
from hydraloop.sweeps.states import JobState, State
from hydraloop.sweeps.sweep_directory import SweepDirectory
from tests.sweeps.test_directory import DESCRIPTION

Play = Callable[["Played", Request], int | None]
"""What the process of a job does. Returns its exit code; None: it is still running."""


@dataclass
class Played:
    """An executor whose jobs do one step in each poll."""

    directory: SweepDirectory
    play: Play
    requests: list[Request] = field(default_factory=list)
    running: dict[int, Request] = field(default_factory=dict)
    cancelled: list[tuple[int, signal.Signals]] = field(default_factory=list)
    most: int = 0
    """Jobs that were running at a time."""
    by_scheduler: bool = False
    """Whether jobs are ended by a scheduler."""
    is_lost: bool = False
    """Whether the machines of jobs are lost."""

    def found(self) -> dict[int, int]:
        """Return the attempts of an earlier controller."""
        return {number: request.attempts + 1 for number, request in self.running.items()}

    def submit(self, request: Request) -> None:
        self.requests.append(request)
        self.running[request.number] = request
        self.most = max(self.most, len(self.running))

    def poll(self, seconds: float) -> list[Ended]:
        ended = [(number, self.play(self, request)) for number, request in list(self.running.items())]
        found = [Ended(number, code, self.by_scheduler, self.is_lost) for number, code in ended if code is not None]
        for one in found:
            del self.running[one.number]
        return found

    def cancel(self, number: int, sign: signal.Signals) -> None:
        self.cancelled.append((number, sign))

    def close(self) -> None: ...

    @property
    def started(self) -> list[int]:
        return [request.number for request in self.requests]

    def write(self, request: Request, state: State) -> None:
        """Write the state, as the process of the job does."""
        folder = self.directory.folder(request.number)
        folder.mkdir(parents=True, exist_ok=True)
        attempts = request.attempts + (state == "running")
        made = JobState(request.number, state, attempts=attempts, controller=request.controller)
        states.write(folder, made, flush=False)


@dataclass
class Seen:
    """What the user would see."""

    lines: list[str] = field(default_factory=list)

    def started(self, state: JobState) -> None:
        self.lines.append(f"{state.number} started")

    def ended(self, state: JobState) -> None:
        self.lines.append(f"{state.number} {state.state}")

    def update(self) -> None: ...


Make = Callable[..., tuple[Controller, Played]]


@pytest.fixture
def directory(tmp_path: Path) -> SweepDirectory:
    return SweepDirectory.create(tmp_path / "sweep", DESCRIPTION)


@pytest.fixture
def make(directory: SweepDirectory) -> Make:
    def made(
        play: Play, *, workers: int = 2, slots: Slots | None = None, earlier: Sequence[int] = (), **options: object
    ) -> tuple[Controller, Played]:
        running = {number: Request(number, (), str(directory.folder(number)), controller="0") for number in earlier}
        executor = Played(directory, play, running=running)
        shares = Shares(workers, slots)
        controller = Controller(
            directory, executor, Grid(dict(enumerate(directory.description.jobs.listed))), shares, Seen(), **options
        )  # type: ignore[arg-type]
        return controller, executor

    return made


def finish(played: Played, request: Request) -> int:
    played.write(request, "running")
    played.write(replace(request, attempts=request.attempts + 1), "finished")
    return 0


def fail(played: Played, request: Request) -> int:
    played.write(request, "running")
    played.write(replace(request, attempts=request.attempts + 1), "failed")
    return 0


def test_each_job_runs_once_and_as_many_at_a_time_as_there_are_workers(make: Make) -> None:
    loop, played = make(finish)
    loop.run()
    assert played.started == [0, 1, 2, 3, 4, 5]
    assert played.requests[3].lines == ("optimizer.lr=1e-2", "seed=0")
    assert (played.most, loop.code, loop.left) == (2, 0, [])
    assert [state.state for state in loop.ended.values()] == ["finished"] * 6
    assert loop.watcher.lines[:3] == ["0 started", "1 started", "0 finished"]  # type: ignore[attr-defined]


def test_a_source_may_wait_for_the_end_of_a_job_before_it_gives_the_next(make: Make) -> None:
    """As a search does. It is told of jobs that were over before."""

    class OneByOne(Source):
        def __init__(self) -> None:
            self.told: list[tuple[int, str]] = []
            self.given = 0

        count = 4

        def look(self, running: Iterable[JobState]) -> dict[int, str]:
            return {}

        def next_job(self) -> Job | None:
            if self.given > len(self.told) - 1 or self.given == 3:
                return None
            self.given += 1
            return Job(self.given, (f"seed={self.given}",))

        def ended(self, state: JobState) -> None:
            self.told.append((state.number, state.state))

    loop, played = make(finish)
    finish(played, Request(0, (), ""))
    source = OneByOne()
    loop = Controller(loop.directory, played, source, Shares(2), Seen())  # type: ignore[arg-type]
    loop.run()
    assert source.told == [(number, "finished") for number in range(4)]
    assert [(request.number, request.lines) for request in played.requests] == [
        (number, (f"seed={number}",)) for number in (1, 2, 3)
    ]
    assert played.most == 1


def test_a_sweep_that_stops_after_a_failure_does_not_wait_for_its_source(make: Make) -> None:
    class Waiting(Grid):
        waits = True  # another process decides

    loop, played = make(fail, workers=1, stop_on_failure=True)
    loop.source = Waiting(dict(enumerate(loop.directory.description.jobs.listed)))
    loop.run()
    assert played.started == [0]


def test_jobs_that_are_over_do_not_run_again_and_failed_ones_if_asked_for(make: Make) -> None:
    make(lambda played, request: fail(played, request) if request.number == 2 else finish(played, request))[0].run()
    loop, played = make(finish)
    loop.run()
    assert played.started == []
    assert loop.code == 1
    loop, played = make(finish, retry_failed=True)
    loop.run()
    assert [(request.number, request.attempts) for request in played.requests] == [(2, 1)]
    assert loop.code == 0


@pytest.mark.parametrize("retries", [0, 2])
def test_a_job_that_fails_is_retried_as_often_as_asked_and_the_others_run(make: Make, retries: int) -> None:
    def play(played: Played, request: Request) -> int:
        return fail(played, request) if request.number == 1 else finish(played, request)

    loop, played = make(play, max_retries=retries)
    loop.run()
    assert [request.attempts for request in played.requests if request.number == 1] == list(range(retries + 1))
    assert sorted(set(played.started)) == [0, 1, 2, 3, 4, 5]
    assert [state.number for state in loop.failed] == [1]
    assert loop.code == 1


def test_a_killed_job_is_retried(make: Make) -> None:
    def play(played: Played, request: Request) -> int:
        if request.attempts or request.number:
            return finish(played, request)
        played.write(request, "running")
        return -signal.SIGKILL

    loop, played = make(play, max_retries=1)
    loop.run()
    assert played.started.count(0) == 2
    assert loop.code == 0
    assert loop.ended[0].attempts == 2
    assert "0 interrupted" in loop.watcher.lines  # type: ignore[attr-defined]


SIGTERM, OWN = "preempted by SIGTERM", "preempted by my_hook"


@pytest.mark.parametrize(
    ("reason", "by_scheduler", "iterations", "attempts"),
    [
        (SIGTERM, True, (10, 20, 30), 4),
        (OWN, False, (10, 20, 30), 4),
        (OWN, False, (10, 10, 20), 4),  # one retry
        (OWN, False, (10, 10, 5), 3),  # two retries
        (SIGTERM, False, (10, 20, 30), 2),
        ("killed by SIGKILL (out of memory?)", True, (10, 20, 30), 2),
    ],
)
def test_a_preempted_job_is_queued_again_and_an_attempt_without_progress_is_a_retry(
    make: Make, reason: str, by_scheduler: bool, iterations: tuple[int, ...], attempts: int
) -> None:
    def play(played: Played, request: Request) -> int:
        if request.number != 1 or request.attempts == len(iterations):
            return finish(played, request)
        state = JobState(1, "interrupted", attempts=request.attempts + 1, reason=reason)
        state = replace(state, controller=request.controller, iterations=iterations[request.attempts])
        played.directory.folder(1).mkdir(exist_ok=True)
        states.write(played.directory.folder(1), state, flush=False)
        return 75

    loop, played = make(play, max_retries=1)
    played.by_scheduler = by_scheduler
    loop.run()
    assert played.started.count(1) == attempts
    assert (loop.ended[1].state, loop.code) == (("finished", 0) if attempts == 4 else ("interrupted", 1))


def test_a_job_whose_machine_is_lost_starts_again_without_a_retry_but_not_for_ever(make: Make) -> None:
    def play(played: Played, request: Request) -> int:
        if request.number == 0:
            return finish(played, request)
        played.write(request, "running")
        return -signal.SIGKILL if request.number == 2 or request.attempts < 3 else finish(played, request)

    loop, played = make(play)
    played.is_lost = True
    loop.run()
    assert (played.started.count(1), loop.ended[1].state) == (4, "finished")
    assert (played.started.count(2), loop.ended[2].state) == (11, "interrupted")


def test_a_job_whose_controller_has_ended_is_waited_for_and_starts_again(
    directory: SweepDirectory, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "_LOOK", 0.0)
    state = JobState(3, "running", attempts=1, controller="killed")
    lock = RunLock(directory.folder(3), key="").acquire()
    states.write(directory.folder(3), state, flush=False)

    def play(played: Played, request: Request) -> int | None:
        if request.number == 5:
            lock.release()
        return finish(played, request)

    loop, played = make(play, workers=1)
    loop.run()
    assert played.started == [0, 1, 2, 4, 5, 3]
    assert loop.ended[3].state == "finished"


def test_a_paused_job_starts_again_in_the_next_sweep_only(make: Make) -> None:
    def play(played: Played, request: Request) -> int:
        if request.number != 1 or request.attempts == 2:
            return finish(played, request)
        played.write(request, "running")
        played.write(replace(request, attempts=request.attempts + 1), "paused")
        return 75

    for left in ([1], [1], []):
        loop, played = make(play, max_retries=5, stop_on_failure=True)
        loop.run()
        assert played.started.count(1) == 1
        assert (loop.left, loop.failed, loop.code) == (left, [], 0)


def test_a_job_that_another_controller_has_paused_is_left(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "_LOOK", 0.0)
    lock = RunLock(make(finish)[0].directory.folder(1), key="")

    def play(played: Played, request: Request) -> int | None:
        if request.number == 0:  # meanwhile, the other one starts job 1
            lock.acquire()
            played.write(replace(request, number=1, controller="other"), "running")
        if request.number == 5:
            played.write(replace(request, number=1, attempts=1, controller="other"), "paused")
            lock.release()
        return finish(played, request)

    loop, played = make(play, workers=1)
    loop.run()
    assert 1 not in played.started
    assert loop.left == [1]


def test_no_job_starts_after_a_failure_if_asked_for(make: Make) -> None:
    loop, played = make(fail, workers=1, stop_on_failure=True)
    loop.run()
    assert played.started == [0]
    assert (loop.code, loop.left) == (1, [1, 2, 3, 4, 5])


def test_a_job_of_another_controller_is_waited_for(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other controller starts job 1 first, and its process is alive for a while."""
    monkeypatch.setattr(controller, "_LOOK", 0.0)
    lock = RunLock(make(finish)[0].directory.folder(1), key="")
    looks: list[Request] = []

    def play(played: Played, request: Request) -> int | None:
        if request.number != 1:
            looks.append(request)
            if len(looks) == 5:
                finish(played, replace(request, number=1))
                lock.release()
            return finish(played, request)
        lock.acquire()
        played.write(replace(request, controller="other"), "running")
        return LEFT

    loop, played = make(play)
    loop.run()
    assert sorted(played.started) == [0, 1, 2, 3, 4, 5]
    assert loop.code == 0
    assert loop.ended[1].state == "finished"


@pytest.mark.parametrize(("code", "state"), [(LEFT, "failed"), (NOT_RECORDED, "interrupted"), (3, "failed")])
def test_a_program_may_exit_with_the_codes_of_the_protocol(make: Make, code: int, state: str) -> None:
    def play(played: Played, request: Request) -> int:
        if request.number != 1:
            return finish(played, request)
        played.write(request, "running")
        return code

    loop, played = make(play)
    loop.run()
    assert played.started == [0, 1, 2, 3, 4, 5]
    assert (loop.ended[1].state, loop.problem, loop.code) == (state, None, 1)
    assert [one.number for one in loop.failed] == [1]


def test_a_job_that_was_killed_with_its_controller_continues_in_its_turn(directory: SweepDirectory, make: Make) -> None:
    directory.folder(1).mkdir()
    states.write(directory.folder(1), JobState(1, "running", attempts=1), flush=False)
    loop, played = make(finish)
    loop.run()
    assert [(request.number, request.attempts) for request in played.requests[:3]] == [(0, 0), (1, 1), (2, 0)]
    assert loop.ended[1].attempts == 2


@pytest.mark.parametrize("retries", [0, 1])
def test_a_job_whose_launcher_is_killed_each_time_ends(
    make: Make, retries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank lives on for a while, and has the lock."""
    monkeypatch.setattr(controller, "_LOOK", 0.0)
    ranks: list[RunLock] = []

    def play(played: Played, request: Request) -> int:
        if request.number != 0:
            return finish(played, request)
        ranks.append(RunLock(played.directory.folder(0), key="").acquire())
        played.write(request, "running")
        return -signal.SIGKILL

    loop, played = make(play, max_retries=retries)
    loop.watcher.update = lambda: ranks.pop().release() if ranks else None  # type: ignore[method-assign]
    loop.run()
    assert played.started.count(0) == 1 + retries
    assert (loop.ended[0].state, loop.ended[0].reason) == ("interrupted", "killed by SIGKILL (out of memory?)")
    assert loop.left == [0]


def test_a_full_disk_ends_the_sweep(make: Make) -> None:
    loop, played = make(lambda played, request: NOT_RECORDED, workers=1, max_retries=1)
    loop.run()
    assert played.started == [0]
    assert loop.code == 1
    assert loop.problem is not None
    assert "MB are free" in loop.problem.problem
    assert f"sweep.resume={loop.directory.path}" in str(loop.problem)


def test_a_state_that_cannot_be_written_ends_the_sweep_and_names_the_reason(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    def play(played: Played, request: Request) -> int:
        played.write(request, "running")
        monkeypatch.setattr(states, "write", refuse)
        return -signal.SIGKILL

    loop, played = make(play, workers=1)
    loop.run()
    assert (played.started, loop.left, loop.code) == ([0], [0, 1, 2, 3, 4, 5], 1)
    assert str(loop.problem).splitlines()[0].endswith("MB are free: Permission denied")


def test_a_machine_that_can_start_no_process_ends_the_sweep(make: Make) -> None:
    loop, played = make(finish)

    def refuse(request: Request) -> None:
        raise UserError("no process could be started")

    played.submit = refuse  # type: ignore[method-assign]
    loop.run()
    assert (loop.code, loop.left) == (1, [0, 1, 2, 3, 4, 5])


@pytest.mark.parametrize(
    ("number", "codes", "expected"),
    [
        (signal.SIGTERM, (75, 75), 75),
        (signal.SIGTERM, (75, 143), 143),
        (signal.SIGINT, (130, 0), 130),
        (signal.SIGHUP, (129, 129), 129),
    ],
)
def test_a_signal_is_passed_on_and_no_job_starts_after_it(
    make: Make, number: signal.Signals, codes: tuple[int, int], expected: int
) -> None:
    def play(played: Played, request: Request) -> int | None:
        if not played.cancelled:
            if request.number == 0:
                os.kill(os.getpid(), number)
            return None
        played.write(replace(request, attempts=1), "interrupted")
        return codes[request.number]

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
    loop, played = make(play, max_retries=1)
    loop.run()
    assert played.cancelled == [(0, number), (1, number)]
    assert played.started == [0, 1]
    assert (loop.code, loop.left, loop.failed) == (expected, [0, 1, 2, 3, 4, 5], [])


def test_a_second_signal_kills_the_jobs(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "_SECOND", 0.05)

    def play(played: Played, request: Request) -> int | None:
        if (0, signal.SIGKILL) in played.cancelled:
            return -signal.SIGKILL
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        return None

    loop, played = make(play, workers=1)
    loop.run()
    assert [sign for _, sign in played.cancelled[:2]] == [signal.SIGINT, signal.SIGKILL]
    assert loop.code == 130


def test_a_job_that_an_earlier_controller_has_submitted_is_not_submitted_again(
    directory: SweepDirectory, make: Make
) -> None:
    """It waits in the queue: no file tells that it was submitted. The other job has ended meanwhile."""
    finish(Played(directory, finish), Request(2, (), "", controller="0"))
    loop, played = make(finish, earlier=(1, 2))
    loop.run()
    assert played.started == [0, 3, 4, 5]
    assert [(state.state, state.attempts) for state in directory.states()] == [("finished", 1)] * 6


def test_a_controller_that_slurm_starts_again_leaves_its_jobs(make: Make) -> None:
    loop, played = make(lambda played, request: os.kill(os.getpid(), signal.SIGTERM), leaves_jobs=True)
    loop.run()
    assert (played.started, played.cancelled, loop.code) == ([0, 1], [], 75)
