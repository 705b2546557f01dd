"""What Ray's workers run: a slot for one job at a time, and a look at a node. Only plain data goes in and out.

A slot keeps a fork server (see `fork_server`), a new process of the user's command. So a worker of Ray, which has
threads, is never forked, and imports neither torch nor the project.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hydraloop.run_files import environment
from hydraloop.run_files.processes import send
from hydraloop.sweeps.executors import fork_server

_SHOWN = 4000
"""Characters of what a server has printed before it failed."""


class Slot:
    """Runs one job after the other. One thread runs a job, and another one passes signals on."""

    def __init__(self) -> None:
        self._setup: Mapping[str, Any] = {}
        self._variables: Mapping[str, str] = {}
        self._server: Connection | None = None
        self._guard = threading.Lock()
        self._running: dict[tuple[int, int], tuple[int, float | None]] = {}
        """The process of the job that runs, by the number of the job and its attempts before."""
        self._early: dict[tuple[int, int], list[int]] = {}
        """Signals for jobs that have not started yet."""

    def prepare(self, setup: dict[str, Any], variables: dict[str, str]) -> str | None:
        """Start the server. Return why that is not possible here.

        Args:
            setup: `command` and `folder` of the server, and its first message, `begin`.
            variables: added to its environment.
        """
        self._setup, self._variables = setup, variables
        folder = setup["folder"] or os.getcwd()
        ours, theirs = Pipe()
        variables = {**variables, environment.SWEEP_SERVER: str(theirs.fileno())}
        with theirs, tempfile.TemporaryFile() as log:
            try:
                subprocess.Popen(
                    [sys.executable, *setup["command"]],
                    cwd=folder,
                    env={**os.environ, **variables},
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
                theirs.close()
                fork_server.send(ours, setup["begin"])
                fork_server.send(ours, {})
                fork_server.receive(ours)
            except (EOFError, OSError) as error:
                log.seek(0)
                printed = log.read().decode(errors="replace")[-_SHOWN:].strip()
                return f"{socket.gethostname()}: {printed or error}"
        self._server = ours
        return None

    def run(self, request: dict[str, Any], variables: dict[str, str]) -> int | str:
        """Run a job. Return its exit code, or why it cannot be started.

        If the server is killed, this worker ends, too.

        Args:
            request: the job.
            variables: for its environment. Libraries read them when they are imported: others need another server.
        """
        if variables != self._variables:
            if self._server is not None:
                self._server.close()
            problem = self.prepare(dict(self._setup), variables)
            if problem is not None:
                return problem
        assert self._server is not None
        with suppress(EOFError, OSError):
            fork_server.send(self._server, {"job": request})
            answer = fork_server.receive(self._server)
            if "error" in answer:
                return str(answer["error"])
            attempt, process = (request["number"], request["attempts"]), (answer["pid"], answer["since"])
            with self._guard:
                self._running[attempt] = process
                early = self._early.pop(attempt, [])
            for number in early:
                send(*process, signal.Signals(number))
            code = int(fork_server.receive(self._server)["code"])
            del self._running[attempt]
            return code
        os._exit(1)

    def signal(self, attempt: tuple[int, int], number: int) -> None:
        """Send a signal to a job, when it has started.

        Args:
            attempt: the number of the job, and its attempts before.
            number: of the signal.
        """
        with self._guard:
            process = self._running.get(attempt)
            if process is None:
                self._early.setdefault(attempt, []).append(number)
                return
        send(*process, signal.Signals(number))


def look(folder: str, token: str) -> dict[str, Any]:
    """Return what a node has, for `doctor`.

    Args:
        folder: of the project.
        token: the name of a file in it.
    """
    return {
        "host": socket.gethostname(),
        "sees": Path(folder, token).exists(),
        "versions": environment.versions(),
    }
