"""What Ray's workers run: a job as a process, and a look at a node. Only plain data goes in and out.

A worker of Ray has threads, so it is never forked, and imports neither torch nor the project. Ray kills a job's
process with its actor. If the worker of the actor is killed, the job sees that its parent has ended, and saves.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from hydraloop.files import environment


class Job:
    """Runs one job. One thread waits for its process, and another one takes signals."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []
        """Signals for a process that has not started yet."""

    def ready(self) -> None:
        """Return when the actor has started."""

    def run(self, words: Sequence[str], folder: str | None, log: str, variables: Mapping[str, str]) -> int | str:
        """Run a job. Return its exit code, or why it cannot be started here.

        Args:
            words: arguments of Python.
            folder: where it runs; None: where this worker does.
            log: the file to which its output is appended.
            variables: added to its environment.
        """
        variables = {**os.environ, **variables, environment.SWEEP_OWNER: str(os.getpid())}
        try:
            with self._guard, open(log, "ab") as output:
                self._process = subprocess.Popen(
                    [sys.executable, *words],
                    cwd=folder,
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
                for number in self._early:
                    self._process.send_signal(number)
        except OSError as error:
            return f"{socket.gethostname()}: {error}"
        return self._process.wait()

    def signal(self, number: int) -> None:
        """Send a signal to the process, when it has started."""
        with self._guard:
            if self._process is None:
                self._early.append(number)
            else:
                self._process.send_signal(number)
