"""PoolExecutor: runs jobs on this machine, each in a fork of a server process."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from hydraloop.errors import UserError
from hydraloop.launch.termination import is_alive, send, started
from hydraloop.sweeps.executors import fork_server
from hydraloop.sweeps.executors.executor import Cause, Ended, Executor, Request, Worker

log = logging.getLogger(__name__)

_POLL_PROCESSES = 0.1
"""Seconds between two checks of processes whose end no server reports."""
_MOST_KILLED = 3
"""Servers that are killed, one after the other, until this is an error: the machine is out of memory."""

Spawn = Callable[[Request], "subprocess.Popen[bytes]"]
"""Starts a job as a new Python process, in a separate session."""


@dataclass(frozen=True, slots=True)
class _Process:
    pid: int
    since: float | None
    """From `processes.started`."""
    spawned: subprocess.Popen[bytes] | None = None


class PoolExecutor(Executor):
    """Runs jobs as forks of a server, which is started at once, and replaced if it is killed.

    Args:
        worker: what the processes run.
        spawn: starts the jobs if a fork of this process is not safe.

    Raises:
        UserError: the server cannot be started.
    """

    def __init__(self, worker: Worker, spawn: Spawn) -> None:
        self._worker, self._spawn = worker, spawn
        self._jobs: dict[int, _Process] = {}
        self._unreported: set[int] = set()
        """Jobs whose end no server reports: spawned ones, and those of a server that was killed."""
        self._ended: list[Ended] = []
        reason = _why_not_fork()
        self._forks = reason is None
        if reason is not None:
            log.warning("%s: each job is a new Python process, which takes seconds to start", reason)
        self._server = self._start_server() if self._forks else None

    def wait_ready(self) -> None:
        """Wait until a job can start within milliseconds.

        Raises:
            UserError: the server could not import what jobs need.
        """
        if self._forks:
            self._ask({})

    def submit(self, request: Request) -> None:
        """Start a job, see `Executor`."""
        if not self._forks:
            try:
                spawned = self._spawn(request)
            except OSError as error:
                raise _not_started(str(error)) from error
            self._jobs[request.number] = _Process(spawned.pid, started(spawned.pid), spawned)
            self._unreported.add(request.number)
            return
        answer = self._ask({"job": asdict(request)})
        if "error" in answer:
            raise _not_started(answer["error"])
        self._jobs[request.number] = _Process(answer["pid"], answer["since"])

    def poll(self, seconds: float) -> list[Ended]:
        """Return the processes that have ended, see `Executor`."""
        until = time.monotonic() + seconds
        while True:
            self._read_messages(0.0)
            for number in [number for number in self._unreported if self._has_ended(number)]:
                spawned = self._jobs[number].spawned
                if spawned is None:
                    self._end(number, None, Cause.LOST)
                else:
                    self._end(number, spawned.returncode)
            remaining = until - time.monotonic()
            if self._ended or remaining <= 0:
                ended, self._ended = self._ended, []
                return ended
            self._read_messages(min(remaining, _POLL_PROCESSES) if self._unreported else remaining)

    def cancel(self, number: int, sign: signal.Signals) -> None:
        """Send a signal to a job, see `Executor`."""
        process = self._jobs.get(number)
        if process is not None:
            send(process.pid, process.since, sign)

    def close(self) -> None:
        """End the server. Running jobs save and end."""
        if self._server is not None:
            self._server[0].kill()
            self._server_ended()

    def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message to the server, and return its answer. A server that was killed is replaced."""
        for _ in range(_MOST_KILLED):
            if self._server is None:
                self._server = self._start_server()
            connection = self._server[1]
            try:
                fork_server.send(connection, message)
                while "ended" in (answer := fork_server.receive(connection)):
                    self._end(answer["ended"], answer["code"])
                return answer
            except (EOFError, OSError):
                if self._server_ended() >= 0:
                    problem = "the process that imports what jobs need has failed"
                    raise UserError(problem, remedy="The traceback above says why.") from None
        raise _not_started("the process that starts them was killed several times")

    def _start_server(self) -> tuple[BaseProcess, Connection]:
        try:
            return fork_server.start(self._worker)
        except OSError as error:
            raise _not_started(error.strerror) from error

    def _read_messages(self, seconds: float) -> None:
        """Wait for a message of the server, and read all that have come."""
        if self._server is None:
            time.sleep(seconds)
            return
        try:
            ready = wait([self._server[1]], seconds)
            while ready:
                message = fork_server.receive(self._server[1])
                self._end(message["ended"], message["code"])
                ready = wait([self._server[1]], 0.0)
        except (EOFError, OSError):
            self._server_ended()

    def _server_ended(self) -> int:
        """Note that the server has ended, or is about to. Returns its exit code."""
        assert self._server is not None
        process, connection = self._server
        self._server = None
        self._unreported.update(self._jobs)
        connection.close()
        process.join()
        assert process.exitcode is not None
        return process.exitcode

    def _has_ended(self, number: int) -> bool:
        process = self._jobs[number]
        if process.spawned is not None:
            return process.spawned.poll() is not None
        return not is_alive(process.pid, process.since)

    def _end(self, number: int, code: int | None, cause: Cause = Cause.PROCESS) -> None:
        del self._jobs[number]
        self._unreported.discard(number)
        self._ended.append(Ended(number, code, cause))


def _why_not_fork() -> str | None:
    """Return why a fork of this process is not safe; None if it is."""
    if sys.platform == "darwin":
        return "libraries of macOS do not survive a fork"
    if threading.active_count() > 1:
        return f"the program has started threads ({', '.join(thread.name for thread in threading.enumerate()[1:])})"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "the program has used CUDA before the sweep"
    return None


def _not_started(problem: str | None) -> UserError:
    return UserError(
        f"no process could be started for a job: {problem}",
        remedy="Free memory or disk space, or run fewer jobs at a time, as with sweep.max_workers=1.",
    )
