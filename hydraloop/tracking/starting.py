"""Starts senders: that of a single run, and that of a sweep, which jobs on this machine share.

Importing a library takes seconds of CPU time, which a sweep of short jobs would pay for each job. Therefore the first
job that needs a sender starts it for all of them. Neither the end of that job nor that of the controller ends it.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from hydraloop.tracking.tracker import FOLDER

LEFT = 3
"""Outcome of a run, and exit code of its sender, if something was not sent in time."""
HANGS = 4
"""The same if a call has not returned in time."""
MARGIN = 1.0
"""Seconds after `flush_timeout` at which a run is given up, whatever hangs."""
SENDERS = "HYDRALOOP_SENDERS"
"""Variable with a folder for the sockets of a sweep's senders, which only this user may enter. The controller of the
sweep sets it, and waits for the senders. Otherwise each job has a sender of its own, for which it waits."""
_SHARED = ("kind", "options", "secrets", "folders", "trusted", "environment", "cwd")
"""What the runs of a sender have in common, of their first message: server, account and credentials are among it."""
_MODULE = "hydraloop.tracking.sender"
_ROOT = Path(__file__).resolve().parents[2]
"""Folder that hydraloop is imported from."""
_BACKLOG = 128
"""Jobs that may connect while the sender starts."""


class Sender:
    """A connection to a sender, with which lines of JSON are exchanged.

    Args:
        process: the sender, if it serves only this connection.
    """

    def __init__(self, connection: socket.socket, process: subprocess.Popen[bytes] | None) -> None:
        self._connection, self._process = connection, process
        self._messages: SimpleQueue[Mapping[str, Any] | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="to a sender", daemon=True)
        self._writer.start()

    @classmethod
    def of_run(cls, run_dir: Path, name: str) -> Sender:
        """Start the sender of a single run. Its stderr is appended to `<run_dir>/tracking/<name>.log`.

        Raises:
            OSError: it could not be started.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                return cls(ours, _start(log_of(run_dir, name), theirs, run_dir, name))
        except BaseException:
            ours.close()
            raise

    @classmethod
    def of_sweep(cls, folder: Path, name: str, first: Mapping[str, Any]) -> Sender:
        """Connect to the sender that jobs of the sweep in a folder share for a hook. Start it if it does not run.

        Args:
            first: the first message. Only jobs with equal options and environment share a sender.

        Raises:
            OSError: this is not possible here.
        """
        from filelock import FileLock  # imported here, because the command line does not need it

        shared = json.dumps([first[key] for key in _SHARED], sort_keys=True).encode()
        path = Path(os.environ[SENDERS], hashlib.sha256(shared).hexdigest()[:16])
        if path.parent.stat().st_uid != os.getuid():
            raise PermissionError(f"{path.parent} is another user's")
        with FileLock(f"{path}.lock"):
            with suppress(OSError):
                return cls(_connected(path), None)
            path.unlink(missing_ok=True)
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
                listener.listen(_BACKLOG)
                process = _start(log_of(folder, name), listener, folder)
            threading.Thread(target=process.wait, daemon=True).start()  # it has forked the sender
            return cls(_connected(path), None)

    def tell(self, message: Mapping[str, Any] | None) -> None:
        """Send a message; None after the last one. Never waits: a thread writes, because the process may hang."""
        self._messages.put(message)

    def delivered(self, seconds: float) -> None:
        """Wait until the last message is written."""
        self._writer.join(seconds)

    def messages(self) -> Iterator[Mapping[str, Any]]:
        """Yield the sender's messages until it closes the connection."""
        with suppress(ConnectionError), self._connection.makefile("rb") as lines:
            for line in lines:
                with suppress(ValueError):  # an incomplete line: the process was killed while it wrote
                    yield json.loads(line)

    def close(self) -> int | None:
        """Close the connection, and wait until the process exits, if it serves only this connection.

        Returns:
            The exit code; None if other runs have the same sender.
        """
        code = None if self._process is None else self._process.wait()
        self.tell(None)
        self._connection.close()
        return code

    def kill(self) -> None:
        """Kill the process and all that it has started (its session), if it serves only this connection."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _write(self) -> None:
        with suppress(OSError):  # the sender has exited
            while (message := self._messages.get()) is not None:
                self._connection.sendall(json.dumps(message).encode() + b"\n")
            self._connection.shutdown(socket.SHUT_WR)


def log_of(directory: Path, name: str) -> Path:
    """Return the file with the output of the sender of a run or sweep."""
    return directory / FOLDER / f"{name}.log"


def spawn(module: str, *arguments: str, pipes: tuple[int, int, int]) -> subprocess.Popen[bytes]:
    """Start `python -m module arguments` in a new session, in which it does not receive Ctrl-C."""
    stdin, stdout, stderr = pipes
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,
    )


def _start(log: Path, connection: socket.socket, directory: Path, *name: str) -> subprocess.Popen[bytes]:
    if not directory.is_dir():  # the next line would create an empty one
        raise FileNotFoundError(f"{directory} is gone")
    log.parent.mkdir(exist_ok=True)
    with log.open("ab") as output:
        pipes = (connection.fileno(), output.fileno(), output.fileno())
        return spawn(_MODULE, str(directory.absolute()), *name, pipes=pipes)


def _connected(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        raise
    return connection
