"""The loop of a sweep, with jobs that are played in this process: starts, ends, retries, signals, other controllers."""

from __future__ import annotations

import errno
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hydraloop.errors import UserError
from hydraloop.files.lock import RunLock
from hydraloop.files.result import Result, Status
from hydraloop.sweeps import controller, job_states, signals
from hydraloop.sweeps.controller import Controller
from hydraloop.sweeps.executors.executor import Cause, Ended, Request
from hydraloop.sweeps.executors.gpus import Shares, Slots
from hydraloop.sweeps.job_directories import JobDirectories
from hydraloop.sweeps.job_source import Grid, Job, Source
from hydraloop.sweeps.job_states import JobState
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
    cause: Cause = Cause.PROCESS
    """What ends the processes of jobs."""

    def adopt(self) -> list[int]:
        """Return the jobs of an earlier controller."""
        return [*self.running]

    def submit(self, request: Request) -> None:
        self.requests.append(request)
        self.running[request.number] = request
        self.most = max(self.most, len(self.running))

    def poll(self, seconds: float) -> list[Ended]:
        ended = [(number, self.play(self, request)) for number, request in list(self.running.items())]
        found = [Ended(number, code, self.cause) for number, code in ended if code is not None]
        for one in found:
            del self.running[one.number]
        return found

    def cancel(self, number: int, sign: signal.Signals) -> None:
        self.cancelled.append((number, sign))

    def close(self) -> None: ...

    @property
    def started(self) -> list[int]:
        return [request.number for request in self.requests]


def write(request: Request, status: Status, **told: Any) -> None:
    """Write the result, as the process of the job does."""
    Result(status, seconds=float(request.attempt), **told).write(Path(request.run_dir))


@dataclass
class Seen:
    """What the user would see."""

    lines: list[str] = field(default_factory=list)

    def started(self, state: JobState) -> None:
        self.lines.append(f"{state.number} started")

    def ended(self, state: JobState) -> None:
        self.lines.append(f"{state.number} {state.state}")

    def update(self) -> None: ...


NO_GRID: Any = None
"""The directories of jobs are their numbers."""
Make = Callable[..., tuple[Controller, Played]]


@pytest.fixture
def directory(tmp_path: Path) -> SweepDirectory:
    return SweepDirectory.create(tmp_path / "sweep", DESCRIPTION)


@pytest.fixture
def make(directory: SweepDirectory) -> Make:
    def made(
        play: Play, *, workers: int = 2, slots: Slots | None = None, earlier: Sequence[int] = (), **options: object
    ) -> tuple[Controller, Played]:
        running = {number: Request(number, (), "", str(directory.folder(number))) for number in earlier}
        executor = Played(directory, play, running=running)
        shares = Shares(workers, slots)
        source, places = Grid(dict(enumerate(directory.description.jobs.listed))), JobDirectories(directory, NO_GRID)
        return Controller(directory, executor, source, shares, Seen(), places, **options), executor  # type: ignore[arg-type]

    return made


def finish(played: Played, request: Request) -> int:
    write(request, "finished", progress={"iteration": 1})
    return 0


def fail(played: Played, request: Request) -> int:
    write(request, "failed", error="ValueError: x", progress={"iteration": 0})
    return 1


def fail_to_build(played: Played, request: Request) -> int:
    write(request, "failed", error="ValueError: x")
    return 1


def test_each_job_runs_once_and_as_many_at_a_time_as_there_are_workers(make: Make) -> None:
    loop, played = make(finish)
    loop.run()
    assert played.started == [0, 1, 2, 3, 4, 5]
    assert played.requests[3].lines == ("optimizer.lr=1e-2", "seed=0")
    assert (played.most, loop.exit_code, loop.unfinished) == (2, 0, [])
    assert [state.state for state in loop.ended_states.values()] == ["finished"] * 6
    assert loop.watcher.lines[:3] == ["0 started", "1 started", "0 finished"]  # type: ignore[attr-defined]


def test_a_source_may_wait_for_the_end_of_a_job_before_it_gives_the_next(make: Make) -> None:
    """As a search does. It is told of jobs that were over before."""

    class OneByOne(Source):
        def __init__(self) -> None:
            self.told: list[tuple[int, str]] = []
            self.given = 0

        count = 4

        def jobs_to_prune(self, running: Iterable[JobState]) -> dict[int, str]:
            return {}

        def next_job(self) -> Job | None:
            if self.given > len(self.told) - 1 or self.given == 3:
                return None
            self.given += 1
            return Job(self.given, (f"seed={self.given}",))

        def job_ended(self, state: JobState) -> None:
            self.told.append((state.number, state.state))

    loop, played = make(finish)
    loop.directory.write(JobState(0, "finished"))
    source = OneByOne()
    loop = Controller(loop.directory, played, source, Shares(2), Seen(), loop.job_directories)  # type: ignore[arg-type]
    loop.run()
    assert source.told == [(number, "finished") for number in range(4)]
    assert [(request.number, request.lines) for request in played.requests] == [
        (number, (f"seed={number}",)) for number in (1, 2, 3)
    ]
    assert played.most == 1


def test_jobs_that_are_over_do_not_run_again_and_failed_ones_if_asked_for(make: Make) -> None:
    make(lambda played, request: fail(played, request) if request.number == 2 else finish(played, request))[0].run()
    loop, played = make(finish)
    loop.run()
    assert played.started == []
    assert loop.exit_code == 1
    loop, played = make(finish, retry_failed=True)
    loop.run()
    assert [(request.number, request.attempt) for request in played.requests] == [(2, 2)]
    assert loop.exit_code == 0


@pytest.mark.parametrize("retries", [0, 2])
def test_a_job_that_fails_is_retried_as_often_as_asked_and_the_others_run(make: Make, retries: int) -> None:
    def play(played: Played, request: Request) -> int:
        return fail(played, request) if request.number == 1 else finish(played, request)

    loop, played = make(play, max_retries=retries)
    loop.run()
    assert [request.attempt for request in played.requests if request.number == 1] == list(range(1, retries + 2))
    assert sorted(set(played.started)) == [0, 1, 2, 3, 4, 5]
    assert [state.number for state in loop.failed] == [1]
    assert loop.exit_code == 1


def test_a_job_that_fails_while_the_sweep_stops_keeps_its_retries_and_used_ones_stay_used(make: Make) -> None:
    def play(played: Played, request: Request) -> int:
        if request.number == 0 and request.attempt == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return fail(played, request)

    loop, _ = make(play, workers=1, max_retries=1)
    loop.run()
    state = loop.directory.state(0)
    assert (state.state, state.reason, state.error, state.retries) == ("interrupted", "ValueError: x", None, 1)
    assert (loop.unfinished[:1], loop.failed) == ([0], [])
    loop, played = make(fail, max_retries=1)
    loop.run()
    assert (played.started.count(0), played.started.count(1)) == (1, 2)
    assert {(state.state, state.attempts) for state in loop.failed} == {("failed", 2)}


def test_a_job_that_is_pruned_does_not_start_again_for_its_retry(make: Make) -> None:
    """Job 0 was lost. Its retry waits until it is known whether job 3 can be built, unlike jobs 1 and 2."""

    class Pruning(Grid):
        reasons = {0: "another job of the trial has failed"}

        def jobs_to_prune(self, running: Iterable[JobState]) -> dict[int, str]:
            return {} if 0 in [state.number for state in running] else self.reasons

        def job_ended(self, state: JobState) -> None:
            self.reasons.pop(state.number, None)
            super().job_ended(state)

    def play(played: Played, request: Request) -> int | None:
        if request.number == 0:
            return -signal.SIGKILL
        if request.number in (1, 2):
            return fail_to_build(played, request)
        return None if 0 in Pruning.reasons else finish(played, request)

    loop, played = make(play, workers=4)
    loop.source, played.cause = Pruning(dict(enumerate(loop.directory.description.jobs.listed))), Cause.LOST
    loop.run()
    assert (played.started.count(0), loop.ended_states[0].state, loop.exit_code) == (1, "pruned", 1)
    assert len(loop.ended_states) == 6


def test_a_killed_job_is_retried(make: Make) -> None:
    def play(played: Played, request: Request) -> int:
        return finish(played, request) if request.attempt > 1 or request.number else -signal.SIGKILL

    loop, played = make(play, max_retries=1)
    loop.run()
    assert played.started.count(0) == 2
    assert loop.exit_code == 0
    assert loop.ended_states[0].attempts == 2
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
        if request.number != 1 or request.attempt > len(iterations):
            return finish(played, request)
        write(request, "interrupted", reason=reason, progress={"iteration": iterations[request.attempt - 1]})
        return 75

    loop, played = make(play, max_retries=1)
    played.cause = Cause.SCHEDULER if by_scheduler else Cause.PROCESS
    loop.run()
    assert played.started.count(1) == attempts
    assert (loop.ended_states[1].state, loop.exit_code) == (("finished", 0) if attempts == 4 else ("interrupted", 1))


def test_a_job_whose_machine_is_lost_starts_again_without_a_retry_but_not_for_ever(make: Make) -> None:
    def play(played: Played, request: Request) -> int:
        is_killed = request.number == 2 or (request.number == 1 and request.attempt < 4)
        return -signal.SIGKILL if is_killed else finish(played, request)

    loop, played = make(play)
    played.cause = Cause.LOST
    loop.run()
    assert (played.started.count(1), loop.ended_states[1].state) == (4, "finished")
    assert (played.started.count(2), loop.ended_states[2].state) == (11, "interrupted")


def test_a_job_whose_controller_has_ended_is_waited_for_and_starts_again(
    directory: SweepDirectory, make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(controller, "_CHECK_INTERVAL", 0.0)
    directory.write(JobState(3, "running", attempts=1, directory="3"))
    lock = RunLock(directory.folder(3), key="").acquire()

    def play(played: Played, request: Request) -> int | None:
        if request.number == 5:
            lock.release()
        return finish(played, request)

    loop, played = make(play, workers=2)
    loop.run()
    assert played.started == [0, 1, 2, 4, 5, 3]
    assert loop.ended_states[3].state == "finished"
    pid, host = os.getpid(), socket.gethostname()
    assert caplog.messages == [
        f"job 3 still saves, in process {pid} on {host}, and the sweep waits for it\n"
        f"  If the process hangs, run `kill -9 {pid}` on {host}. The sweep then continues the job."
    ]


@pytest.mark.parametrize("shares", [{"slots": Slots(["0", "1"], 1)}, {"workers": 1}], ids=["GPUs", "workers"])
def test_no_job_takes_the_place_of_a_job_of_an_earlier_controller_that_still_saves(
    shares: dict[str, Any], directory: SweepDirectory, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "_CHECK_INTERVAL", 0.0)
    directory.write(JobState(3, "running", attempts=1, directory="3"))
    lock = RunLock(directory.folder(3), key="").acquire()
    loop, played = make(finish, **shares)
    started: list[list[int]] = []
    loop.watcher.update = lambda: (started.append(played.started), lock.release())[1]  # type: ignore[method-assign]
    loop.run()
    assert (started[0], len(played.started)) == ([], 6)


def test_a_paused_job_starts_again_in_the_next_sweep_only(make: Make) -> None:
    def play(played: Played, request: Request) -> int:
        if request.number != 1 or request.attempt == 3:
            return finish(played, request)
        write(request, "interrupted", reason="preempted by engine.pause_after=1")
        return 75

    for left in ([1], [1], []):
        loop, played = make(play, max_retries=5, stop_on_failure=True)
        loop.run()
        assert played.started.count(1) == 1
        assert (loop.unfinished, loop.failed, loop.exit_code) == (left, [], 0)


def test_no_job_starts_after_a_failure_if_asked_for(make: Make) -> None:
    loop, played = make(fail, workers=1, stop_on_failure=True)
    loop.run()
    assert played.started == [0]
    assert (loop.exit_code, loop.unfinished) == (1, [1, 2, 3, 4, 5])


def refuse_option(played: Played, request: Request) -> int:
    write(request, "failed", error="sweep.objectives: no metric", progress={"iteration": 0})
    return 1


@pytest.mark.parametrize(
    ("play", "error"), [(fail_to_build, "ValueError: x"), (refuse_option, "sweep.objectives: no metric")]
)
def test_a_sweep_whose_jobs_cannot_be_built_stops_and_continues_when_it_is_resumed(
    make: Make, play: Play, error: str
) -> None:
    loop, played = make(play, workers=1)
    loop.run()
    assert played.started == [0, 1]
    assert (loop.exit_code, loop.unfinished, loop.failed) == (1, [0, 1, 2, 3, 4, 5], [])
    assert "sweep.resume=" in str(loop.problem)
    state = loop.directory.state(1)
    assert (state.state, state.reason, state.error) == ("interrupted", error, None)
    loop, played = make(finish)
    loop.run()
    assert (played.started, loop.exit_code) == ([0, 1, 2, 3, 4, 5], 0)


def test_the_only_built_job_is_retried_after_two_others_could_not_be_built(make: Make) -> None:
    def play(played: Played, request: Request) -> int | None:
        if request.number != 2:
            return fail_to_build(played, request) if len(played.requests) < 4 else finish(played, request)
        if request.attempt > 1:
            return finish(played, request)
        if 1 not in loop.ended_states:
            return None
        write(request, "interrupted", reason=OWN, progress={"iteration": 10})
        return 75

    loop, _ = make(play, workers=3)
    loop.run()
    assert (loop.ended_states[2].state, loop.ended_states[2].attempts, loop.problem) == ("finished", 2, None)
    assert len(loop.ended_states) == 6


@pytest.mark.parametrize("case", ["other errors", "while training", "a job was built", "a job trains"])
def test_jobs_that_fail_do_not_stop_a_sweep_if_others_may_succeed(make: Make, case: str) -> None:
    def play(played: Played, request: Request) -> int | None:
        if case == "other errors":
            write(request, "failed", error=f"ValueError: {request.number}")
            return 1
        if case == "while training":
            return fail(played, request)
        if request.number == 0:
            if case == "a job was built":
                return finish(played, request)
            (Path(request.run_dir) / "metrics.jsonl").touch()
            return finish(played, request) if len(played.requests) == 6 else None
        return fail_to_build(played, request)

    loop, played = make(play)
    loop.run()
    assert (played.started, loop.problem) == ([0, 1, 2, 3, 4, 5], None)


def test_a_job_that_was_lost_with_its_controller_continues_in_its_turn(directory: SweepDirectory, make: Make) -> None:
    """Without a retry. Another one has written its result before the controller was killed."""
    for number in (1, 2):
        directory.write(JobState(number, "running", attempts=1, directory=str(number)))
    write(Request(2, (), "", str(directory.folder(2))), "finished")
    loop, played = make(finish)
    loop.run()
    assert [(request.number, request.attempt) for request in played.requests[:3]] == [(0, 1), (1, 2), (3, 1)]
    assert (loop.ended_states[1].attempts, loop.ended_states[2].attempts) == (2, 1)


@pytest.mark.parametrize("retries", [0, 1])
def test_a_job_whose_launcher_is_killed_each_time_ends(
    make: Make, retries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank lives on for a while, and has the lock."""
    monkeypatch.setattr(controller, "_CHECK_INTERVAL", 0.0)
    ranks: list[RunLock] = []

    def play(played: Played, request: Request) -> int:
        if request.number != 0:
            return finish(played, request)
        ranks.append(RunLock(played.directory.folder(0), key="").acquire())
        return -signal.SIGKILL

    loop, played = make(play, max_retries=retries)
    loop.watcher.update = lambda: ranks.pop().release() if ranks else None  # type: ignore[method-assign]
    loop.run()
    assert played.started.count(0) == 1 + retries
    assert (loop.ended_states[0].state, loop.ended_states[0].reason) == (
        "interrupted",
        "killed by SIGKILL (out of memory?)",
    )
    assert loop.unfinished == [0]


@pytest.mark.parametrize("retries", [0, 1])
def test_a_job_that_fails_after_its_controller_has_ended_is_retried_as_any_other(
    directory: SweepDirectory, make: Make, monkeypatch: pytest.MonkeyPatch, retries: int
) -> None:
    """It still runs when the next controller starts."""
    monkeypatch.setattr(controller, "_CHECK_INTERVAL", 0.0)
    directory.write(JobState(3, "running", attempts=1, directory="3"))
    lock = RunLock(directory.folder(3), key="").acquire()

    def play(played: Played, request: Request) -> int:
        if request.number == 0:
            write(Request(3, (), "", str(directory.folder(3))), "failed", error="ValueError: x")
            lock.release()
        return finish(played, request)

    loop, played = make(play, workers=2, max_retries=retries)
    loop.run()
    assert (played.started.count(3), loop.exit_code) == (retries, 1 - retries)
    assert "3 failed" in loop.watcher.lines  # type: ignore[attr-defined]


def test_a_job_with_a_running_rank_has_not_ended_after_a_full_disk(
    directory: SweepDirectory, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "_CHECK_INTERVAL", 0.0)
    rank = RunLock(directory.folder(1), key="")
    written = job_states.write

    def refuse_once(*args: Any, **options: Any) -> None:
        monkeypatch.setattr(job_states, "write", written)
        raise OSError(errno.ENOSPC, "No space left on device")

    def play(played: Played, request: Request) -> int:
        if request.number == 0:
            monkeypatch.setattr(job_states, "write", refuse_once)
            return -signal.SIGKILL
        rank.acquire()
        return -signal.SIGKILL

    def check_rank() -> None:
        assert directory.state(1).state == "running"
        rank.release()

    loop, _ = make(play)
    loop.watcher.update = check_rank  # type: ignore[method-assign]
    loop.run()
    assert "No space left" in str(loop.problem)
    assert directory.state(1).state == "interrupted"


@pytest.mark.parametrize("at_start", [True, False])
def test_a_state_that_cannot_be_written_ends_the_sweep_and_names_the_reason(
    make: Make, monkeypatch: pytest.MonkeyPatch, at_start: bool
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    def play(played: Played, request: Request) -> int:
        monkeypatch.setattr(job_states, "write", refuse)
        return -signal.SIGKILL

    loop, played = make(play, workers=1)
    if at_start:
        monkeypatch.setattr(job_states, "write", refuse)
    loop.run()
    assert (played.started, loop.unfinished, loop.exit_code) == ([] if at_start else [0], [0, 1, 2, 3, 4, 5], 1)
    assert str(loop.problem).splitlines()[0].endswith("MB are free: Permission denied")
    assert f"sweep.resume={loop.directory.path}" in str(loop.problem)


def test_a_machine_that_can_start_no_process_ends_the_sweep(make: Make) -> None:
    loop, played = make(finish)

    def refuse(request: Request) -> None:
        raise UserError("no process could be started")

    played.submit = refuse  # type: ignore[method-assign]
    loop.run()
    assert (loop.exit_code, loop.unfinished) == (1, [0, 1, 2, 3, 4, 5])


@pytest.mark.parametrize(
    ("number", "codes", "expected"),
    [
        (signal.SIGTERM, (75, 75), 75),
        (signal.SIGTERM, (75, 143), 143),
        (signal.SIGINT, (130, 0), 130),
        (signal.SIGHUP, (143, 75), 129),
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
        write(request, "interrupted")
        return codes[request.number]

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
    loop, played = make(play, max_retries=1)
    loop.run()
    sent = signal.SIGTERM if number == signal.SIGHUP else number
    assert played.cancelled == [(0, sent), (1, sent)]
    assert played.started == [0, 1]
    assert (loop.exit_code, loop.unfinished, loop.failed) == (expected, [0, 1, 2, 3, 4, 5], [])


def test_a_second_signal_kills_the_jobs(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "_SECOND_AFTER", 0.05)

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
    assert loop.exit_code == 130


def test_a_job_that_an_earlier_controller_has_submitted_is_not_submitted_again(
    directory: SweepDirectory, make: Make
) -> None:
    """Job 1 waits in the queue or runs; its `sbatch` may have failed. Job 2 has ended meanwhile."""
    directory.write(JobState(1, "interrupted", attempts=1, directory="1", reason="killed by SIGKILL"))
    directory.write(JobState(2, "finished", attempts=1, directory="2"))
    loop, played = make(finish, earlier=(1, 2))
    assert (directory.state(1).state, directory.state(1).reason) == ("running", None)
    loop.run()
    assert played.started == [0, 3, 4, 5]
    assert [(state.state, state.attempts) for state in directory.states()] == [("finished", 1)] * 6


def test_a_controller_that_slurm_starts_again_leaves_its_jobs(make: Make) -> None:
    loop, played = make(lambda played, request: os.kill(os.getpid(), signal.SIGTERM), jobs_outlive_controller=True)
    loop.run()
    assert (played.started, played.cancelled, loop.exit_code) == ([0, 1], [], 75)


def test_two_failed_builds_prove_nothing_while_another_job_runs_on_slurm(make: Make) -> None:
    def play(played: Played, request: Request) -> int | None:
        return os.kill(os.getpid(), signal.SIGTERM) if request.number == 2 else fail_to_build(played, request)

    loop, _ = make(play, workers=3, jobs_outlive_controller=True)
    loop.run()
    assert (loop.directory.state(0).state, loop.problem, loop.exit_code) == ("failed", None, 75)
