"""Starts followers: each a Python process, or, in a sweep, a fork of a process that has imported the tracker's library.

Importing a library takes seconds of CPU time, which a sweep of short jobs would pay for each job. The process to fork
has a single thread, so a fork is safe. If a library has started a thread, followers are started as Python processes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

LEFT = 3
"""Exit code of a follower if something was not sent in time."""
HANGS = 4
"""Exit code of a follower if a call has not returned in time."""
MARGIN = 1.0
"""Seconds after `flush_timeout` at which a follower is killed, whatever hangs."""
NICE = 5
"""Lower priority than training, because importing libraries takes seconds of CPU time. Not lower still: at the end of
the run, training waits for these processes."""
_ROOT = Path(__file__).resolve().parents[2]
"""Folder that hydraloop is imported from."""
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""numpy and pyarrow start threads when they are imported, unless these variables forbid it."""


class Child:
    """A follower's process, with which lines of JSON are exchanged. Its stderr is appended to the file `errors`.

    It is forked by `server`, or, if that is None, started as a Python process.
    """

    def __init__(self, run_dir: Path, name: str, errors: Path, server: ForkServer | None = None) -> None:
        if not run_dir.is_dir():  # the next line would create an empty one
            raise FileNotFoundError(f"{run_dir} is gone")
        errors.parent.mkdir(exist_ok=True)
        stdin, self._in = os.pipe()
        self._out, stdout = os.pipe()
        arguments = [str(run_dir.absolute()), name]
        self._pid: int | None = None
        self._killed = False
        try:
            with errors.open("ab") as log:
                pipes = (stdin, stdout, log.fileno())
                if server is not None:
                    self._wait = server.fork(arguments, pipes)
                else:
                    process = spawn("hydraloop.tracking.process", *arguments, pipes=pipes)
                    self._wait, self._pid = process.wait, process.pid
        except BaseException:
            os.close(self._in)
            os.close(self._out)
            raise
        finally:
            os.close(stdin)
            os.close(stdout)
        self._messages: SimpleQueue[Mapping[str, Any] | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._write, name=f"to the follower of {name}", daemon=True)
        self._writer.start()

    def tell(self, message: Mapping[str, Any] | None) -> None:
        """Send a message; None after the last one. Never waits: a thread writes, because the process may hang."""
        self._messages.put(message)

    def delivered(self, seconds: float) -> None:
        """Wait until the last message is written."""
        self._writer.join(seconds)

    def messages(self) -> Iterator[Mapping[str, Any]]:
        """Yield the process's messages until it exits."""
        with os.fdopen(self._out, "rb") as lines:
            for line in lines:
                with suppress(ValueError):  # an incomplete line: the process was killed while it wrote
                    message = json.loads(line)
                    if "pid" in message:  # the first one of a fork
                        self._pid = message["pid"]
                        if self._killed:
                            self.kill()
                    else:
                        yield message

    def ended(self) -> int | None:
        """Wait until the process exits. Returns the exit code, or None if it could not be forked."""
        code = self._wait()
        self.tell(None)
        return code

    def kill(self) -> None:
        """Kill the process and all that it has started (its session). Does not wait."""
        self._killed = True
        if self._pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)

    def _write(self) -> None:
        with suppress(OSError), os.fdopen(self._in, "wb", 0) as pipe:  # it has exited, which `ended` reports
            while (message := self._messages.get()) is not None:
                left = memoryview(json.dumps(message).encode() + b"\n")
                while left:
                    left = left[pipe.write(left) :]


def spawn(module: str, *arguments: str, pipes: tuple[int, int, int], **environment: str) -> subprocess.Popen[bytes]:
    """Start `python -m module arguments` in a new session, in which it does not receive Ctrl-C."""
    stdin, stdout, stderr = pipes
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,
    )


class ForkServer:
    """A process that imports a tracker and its library, and is forked for each follower. It ends with this process."""

    def __init__(self, first: Mapping[str, Any], errors: Path) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        errors.parent.mkdir(exist_ok=True)
        with theirs, errors.open("ab") as log:
            pipes = (theirs.fileno(), subprocess.DEVNULL, log.fileno())
            self._process = spawn("hydraloop.tracking.process", pipes=pipes, **_ONE_THREAD)
        self._socket.send(json.dumps({name: first[name] for name in ("kind", "folders", "trusted")}).encode())

    def fork(self, arguments: list[str], pipes: tuple[int, int, int]) -> Callable[[], int | None]:
        """Fork a follower, as soon as the library is imported.

        Returns a function that waits until the follower exits, and returns its exit code; None if it was not forked.
        """
        answers, theirs = os.pipe()
        try:
            socket.send_fds(self._socket, [json.dumps(arguments).encode()], [*pipes, theirs])
        finally:
            os.close(theirs)

        def wait() -> int | None:
            with os.fdopen(answers) as answer:
                code = answer.read()
            return int(code) if code else None

        return wait

    def close(self) -> None:
        """Let the process end, after it has forked the followers that it was asked for. Does not wait."""
        self._socket.close()
        threading.Thread(target=self._process.wait, daemon=True).start()


_servers: dict[str, ForkServer] = {}
"""By kind of tracker. Forks of this process use them, too."""
_is_shared = False
_guard = threading.Lock()


def share_fork_servers(firsts: Iterable[Mapping[str, Any]], errors: Path) -> None:
    """Start the processes that fork followers, in the process that forks the jobs of a sweep, which use them.

    They end with this process. A job that needs another kind, or that lives longer, starts its follower as a Python
    process.

    Args:
        firsts: for each kind of tracker, `kind`, `folders` and `trusted` of its first message.
        errors: a file for the stderr of these processes.
    """
    global _is_shared
    for first in firsts:
        fork_server(first, errors)
    _is_shared = True


def is_shared() -> bool:
    """Return whether this process is a fork for a job of a sweep, whose controller waits for the followers."""
    return _is_shared


def fork_server(first: Mapping[str, Any], errors: Path) -> ForkServer | None:
    """Return the process that forks followers of a kind of tracker, started if needed; None if that is not possible."""
    with _guard, suppress(OSError):  # a system without such sockets
        if first["kind"] not in _servers and not _is_shared:
            _servers[first["kind"]] = ForkServer(first, errors)
        return _servers.get(first["kind"])
    return None


def close_fork_servers() -> None:
    """End the processes that fork followers, after they have forked those that they were asked for. Does not wait."""
    with _guard:
        while _servers:
            _servers.popitem()[1].close()
