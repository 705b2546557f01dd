"""Checks of the pool in a process of their own, because pytest's process has threads.

`python pool_program.py <folder> [slow]` prints the errors of the checks as JSON.
"""

from __future__ import annotations

import functools
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import psutil

from hydraloop.errors import UserError
from hydraloop.launch.termination import is_alive, started
from hydraloop.sweeps.executors.executor import Cause, Ended, Request
from hydraloop.sweeps.executors.pool import PoolExecutor

FOLDER = Path(sys.argv[1])


class Worker:
    """Runs the method that the first line of a request names."""

    def __init__(self) -> None:
        self.prepared = 0

    def prepare(self) -> None:
        self.prepared = os.getpid()

    def run(self, request: Request) -> int:
        method: Callable[[Request], int | None] = getattr(self, request.lines[0])
        return method(request) or 0

    def tell(self, request: Request) -> None:
        """Write what the process looks like."""
        facts = {
            "session": os.getsid(0) == os.getpid(),
            "server": os.getppid() == self.prepared,
            "stdin": sys.stdin.read(),
            "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "threads": os.environ.get("OMP_NUM_THREADS"),
            "length": sum(map(len, request.lines)),
            "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
            "child": signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL,
        }
        Path(request.folder).write_text(json.dumps(facts))

    def code(self, request: Request) -> int:
        return int(request.lines[1])

    def stream(self, request: Request) -> int:
        return 3 if sys.stdout is sys.__stdout__ else 4

    def fail(self, request: Request) -> None:
        raise ValueError("on purpose")

    def interrupt(self, request: Request) -> None:
        os.kill(os.getpid(), signal.SIGINT)  # before the job handles it
        time.sleep(60)

    def sleep(self, request: Request) -> None:
        """Start a child with a session of its own, and one without, and sleep."""
        children = [subprocess.Popen(["sleep", "60"], start_new_session=own) for own in (False, True)]
        Path(request.folder + ".new").write_text(json.dumps([os.getpid(), *(child.pid for child in children)]))
        os.replace(request.folder + ".new", request.folder)
        time.sleep(60)

    def leave_child(self, request: Request) -> None:
        """End, but not a child that has everything of this process open."""
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        Path(request.folder).write_text(json.dumps([child]))


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "too late"
        time.sleep(0.01)


def refused(call: Callable[[], object], kind: type[Exception] = UserError) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("not refused")


def spawn_nothing(job: Request) -> subprocess.Popen[bytes]:
    raise AssertionError("a fork was possible")


@contextmanager
def pool() -> Iterator[PoolExecutor]:
    executor = PoolExecutor(Worker(), spawn_nothing)
    try:
        yield executor
    finally:
        executor.close()


def request(number: int, *lines: str, gpus: tuple[str, ...] | None = None, threads: int | None = None) -> Request:
    path = FOLDER / f"{sys._getframe(1).f_code.co_name}-{number}"
    return Request(number, lines, str(path), str(path), gpus=gpus, threads=threads)


def ended(executor: PoolExecutor, count: int) -> list[Ended]:
    found: list[Ended] = []
    until(lambda: found.extend(executor.poll(0.5)) or len(found) >= count)
    assert executor.poll(0) == []
    return sorted(found, key=lambda end: end.number)


def processes(job: Request) -> list[Callable[[], bool]]:
    """Whether the process of a job that sleeps, and its children, are alive."""
    until(lambda: Path(job.folder).exists())
    return [functools.partial(is_alive, pid, started(pid)) for pid in json.loads(Path(job.folder).read_text())]


def each_job_is_a_process_that_reports_its_end() -> None:
    with pool() as executor:
        for number in range(20):
            executor.submit(request(number, "code", str(number)))
        assert ended(executor, 20) == [Ended(number, number) for number in range(20)]
        executor.submit(request(20, "fail"))
        executor.submit(request(21, "interrupt"))
        assert ended(executor, 2) == [Ended(20, 1), Ended(21, 130)]
        assert len(os.listdir("/proc/self/task")) == 1


def the_end_of_a_job_is_reported_while_its_child_lives() -> None:
    with pool() as executor:
        job = request(0, "leave_child")
        executor.submit(job)
        assert ended(executor, 1) == [Ended(0, 0)]
        (child,) = processes(job)
        assert child()
        os.kill(json.loads(Path(job.folder).read_text())[0], signal.SIGKILL)


def a_job_looks_like_a_single_run() -> None:
    with pool() as executor:
        jobs = [
            request(0, "tell"),
            request(1, "tell", gpus=("2", "3"), threads=4),
            request(2, "tell", "x" * 1_000_000, gpus=()),
        ]
        for job in jobs:
            executor.submit(job)
        assert ended(executor, 3) == [Ended(number, 0) for number in range(3)]
    common = {"session": True, "server": True, "stdin": "", "interrupt": True, "child": True}
    before = {"gpus": os.environ.get("CUDA_VISIBLE_DEVICES"), "threads": os.environ.get("OMP_NUM_THREADS")}
    expected = [
        {**common, **before, "length": 4},
        {**common, "gpus": "2,3", "threads": "4", "length": 4},
        {**common, **before, "gpus": "", "length": 1_000_004},
    ]
    assert [json.loads(Path(job.folder).read_text()) for job in jobs] == expected


def a_job_does_not_print_to_a_table_that_the_controller_shows() -> None:
    with redirect_stdout(io.StringIO()), pool() as executor:
        executor.submit(request(0, "stream"))
        assert ended(executor, 1) == [Ended(0, 3)]


def a_killed_server_is_replaced_and_its_jobs_are_lost() -> None:
    with pool() as executor:
        first = request(0, "sleep")
        executor.submit(first)
        children = processes(first)
        server = psutil.Process().children()[0]
        server.kill()
        time.sleep(0.05)
        executor.submit(request(1, "code", "5"))
        assert ended(executor, 2) == [Ended(0, None, Cause.LOST), Ended(1, 5)]
        assert [is_there() for is_there in children] == [False, True, True]
        for process in json.loads(Path(first.folder).read_text())[1:]:
            os.kill(process, signal.SIGKILL)
        psutil.Process().children()[0].kill()
        assert executor.poll(0.3) == []
        executor.submit(request(2, "code", "6"))
        assert ended(executor, 1) == [Ended(2, 6)]
    assert psutil.Process().children() == []


def a_signal_to_all_processes_does_not_end_the_server() -> None:
    """Slurm sends it so. The server still reports how the jobs have ended."""
    with pool() as executor:
        assert executor._server is not None
        executor.wait_ready()
        job = request(0, "sleep")
        executor.submit(job)
        processes(job)
        for pid in (executor._server[0].pid, executor._jobs[0].pid):
            assert pid is not None
            os.kill(pid, signal.SIGTERM)
        assert ended(executor, 1) == [Ended(0, -signal.SIGTERM)]
        assert executor._server is not None


def a_job_ends_with_its_controller() -> None:
    job = request(0, "sleep")
    controller = os.fork()
    if controller == 0:
        executor = PoolExecutor(Worker(), spawn_nothing)
        executor.submit(job)
        processes(job)
        Path(job.folder + ".server").write_text(str(psutil.Process().children()[0].pid))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(controller, 0)
    server = int(Path(job.folder + ".server").read_text())
    until(lambda: started(server) is None)
    until(lambda: started(json.loads(Path(job.folder).read_text())[0]) is None)
    for process in json.loads(Path(job.folder).read_text())[1:]:
        os.kill(process, signal.SIGKILL)


def a_signal_ends_a_job_and_a_kill_its_whole_tree() -> None:
    with pool() as executor:
        jobs = [request(number, "sleep") for number in range(2)]
        for job in jobs:
            executor.submit(job)
        alive = [processes(job) for job in jobs]
        executor.cancel(0, signal.SIGTERM)
        executor.cancel(1, signal.SIGKILL)
        assert ended(executor, 2) == [Ended(0, -15), Ended(1, -9)]
        until(lambda: not any(is_there() for is_there in alive[1]))
        assert [is_there() for is_there in alive[0]] == [False, True, True]
        for process in json.loads(Path(jobs[0].folder).read_text())[1:]:
            os.kill(process, signal.SIGKILL)
        executor.cancel(1, signal.SIGKILL)  # has ended


def a_server_that_is_killed_again_and_again_is_an_error() -> None:
    class OutOfMemory(Worker):
        def prepare(self) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

    executor = PoolExecutor(OutOfMemory(), spawn_nothing)
    assert "was killed several times" in refused(executor.wait_ready)


def a_server_that_cannot_be_prepared_is_an_error() -> None:
    class Broken(Worker):
        def prepare(self) -> None:
            sys.excepthook = lambda *error: None
            raise ImportError("on purpose")

    executor = PoolExecutor(Broken(), spawn_nothing)
    job = request(0, "code", "0")
    assert "the process that imports what jobs need has failed" in refused(lambda: executor.submit(job))
    assert psutil.Process().children() == []


def jobs_are_new_processes_if_the_program_has_a_thread() -> None:
    def spawn(job: Request) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sh", "-c", f"exit {job.lines[0]}"])

    may_end = threading.Event()
    thread = threading.Thread(target=may_end.wait)
    thread.start()
    executor = PoolExecutor(Worker(), spawn)
    may_end.set()
    thread.join()
    executor.submit(Request(0, ("7",), "", ""))
    executor.submit(Request(1, ("8",), "", ""))
    assert ended(executor, 2) == [Ended(0, 7), Ended(1, 8)]
    executor.close()


def a_job_runs_tensor_operations_after_its_controller() -> None:
    """Without the new thread that forks the server, the job would never end."""
    import torch

    def multiply() -> None:
        matrix = torch.ones(500, 500, requires_grad=True)
        (matrix @ matrix).sum().backward()

    class Tensors(Worker):
        def multiply(self, request: Request) -> None:
            multiply()

    torch.set_num_threads(2)
    multiply()
    executor = PoolExecutor(Tensors(), spawn_nothing)
    executor.submit(request(0, "multiply"))
    assert ended(executor, 1) == [Ended(0, 0)]
    executor.close()


CHECKS = [
    each_job_is_a_process_that_reports_its_end,
    the_end_of_a_job_is_reported_while_its_child_lives,
    a_job_looks_like_a_single_run,
    a_job_does_not_print_to_a_table_that_the_controller_shows,
    a_killed_server_is_replaced_and_its_jobs_are_lost,
    a_signal_to_all_processes_does_not_end_the_server,
    a_job_ends_with_its_controller,
    a_signal_ends_a_job_and_a_kill_its_whole_tree,
    a_server_that_cannot_be_prepared_is_an_error,
    a_server_that_is_killed_again_and_again_is_an_error,
    jobs_are_new_processes_if_the_program_has_a_thread,
]

SLOW = [a_job_runs_tensor_operations_after_its_controller]

if __name__ == "__main__":
    errors: dict[str, str] = {}
    for check in SLOW if sys.argv[2:] == ["slow"] else CHECKS:
        begin = time.monotonic()
        try:
            check()
        except BaseException:
            errors[check.__name__] = traceback.format_exc()
        print(check.__name__, round(time.monotonic() - begin, 2), file=sys.stderr)
    print(json.dumps(errors))
