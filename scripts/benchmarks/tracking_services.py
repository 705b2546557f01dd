"""Tracking services that break when told to: an MLflow server, one that is silent, one that is slow, a small disk.

They stand for other machines, and so run with less priority than training, whose speed is measured beside them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from urllib.request import urlopen

_LONGEST_START = 120.0
"""Seconds for a server's start: it imports for some, and the machine may be busy."""


class MLflowServer:
    """`mlflow server` on a port of loopback that stays the same, over an SQLite database in a folder."""

    def __init__(self, folder: Path, *, port: int | None = None) -> None:
        self.folder, self.port = folder, port or free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def uri(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def database(self) -> Path:
        """Its database, which can be read while it is down."""
        return self.folder / "mlflow.db"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self.begin()
        deadline = time.monotonic() + _LONGEST_START
        while not self._answers():
            assert self._process is not None, "it was begun"
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((self.folder / "server.log").read_text(encoding="utf-8")[-4000:])
            time.sleep(0.1)

    def begin(self) -> None:
        """Start it, without waiting."""
        command = ["nice", "-n", "10", sys.executable, "-m", "mlflow", "server", "--workers", "1"]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--backend-store-uri", f"sqlite:///{self.database}"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        quick = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (self.folder / "server.log").open("ab") as output:
            self._process = subprocess.Popen(
                command,
                cwd=self.folder,
                env={name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"} | quick,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def kill(self) -> None:
        """`kill -9` of it and its workers."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), urlopen(f"{self.uri}/health", timeout=5) as answer:
            return bool(answer.status == 200)
        return False


class Proxy:
    """Passes on what comes in at a port, after a delay; without a target it accepts, and never answers.

    Args:
        target: a port of loopback.
    """

    def __init__(self, target: int | None = None) -> None:
        self.target, self.delay = target, 0.0
        """Seconds before what the client sends is passed on."""
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = int(self._listener.getsockname()[1])
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def uri(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        """Accept nothing any more, and end what goes on."""
        for one in [self._listener, *self._open]:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # a thread that waits in accept or recv would keep it open
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._open.append(client)
                if self.target is not None:
                    server = socket.create_connection(("127.0.0.1", self.target))
                    self._open.append(server)
                    for pair in ((client, server, True), (server, client, False)):
                        threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, delayed: bool) -> None:
        """Each part later than it came: parts of one message do not wait for each other."""
        parts: SimpleQueue[tuple[float, bytes]] = SimpleQueue()
        threading.Thread(target=_send, args=(parts, sink), daemon=True).start()
        data = b"-"
        while data:
            try:
                data = source.recv(1 << 16)
            except OSError:
                data = b""
            parts.put((time.monotonic() + (self.delay if delayed else 0.0), data))


def _send(parts: SimpleQueue[tuple[float, bytes]], sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            due, data = parts.get()
            time.sleep(max(0.0, due - time.monotonic()))
            if not data:
                sink.shutdown(socket.SHUT_RDWR)
                return
            sink.sendall(data)


class SmallDisk:
    """A file system of its own in a folder, in memory. Needs the right to mount (`in_own_mounts`)."""

    def __init__(self, folder: Path, *, size: str = "48m") -> None:
        self.folder = folder
        folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)

    def fill(self) -> None:
        """Leave no byte free."""
        with (self.folder / "filler").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(1 << 12))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise

    def empty(self) -> None:
        """Make room again."""
        (self.folder / "filler").unlink()

    def make_read_only(self, read_only: bool) -> None:
        """Whether nobody, not even root, can write to it."""
        subprocess.run(["mount", "-o", f"remount,{'ro' if read_only else 'rw'}", self.folder], check=True)

    def close(self) -> None:
        """Take it away."""
        subprocess.run(["umount", "--lazy", self.folder], check=True)


_MOUNTS = "HYDRALOOP_OWN_MOUNTS"


def in_own_mounts() -> bool:
    """Start this script again where it may mount, and where mounts end with it. False where the system has no way."""
    if _MOUNTS in os.environ:
        return True
    unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--user", "--map-root-user"]
    try:
        subprocess.run([*unshare, "true"], check=True, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        return False
    os.environ[_MOUNTS] = "1"
    sys.stdout.flush()
    return os.execvp(unshare[0], [*unshare, sys.executable, *sys.argv])  # which does not


@contextlib.contextmanager
def stopped(*services: MLflowServer | Proxy) -> Iterator[None]:
    """Stop them at the end."""
    try:
        yield
    finally:
        for service in services:
            if isinstance(service, MLflowServer):
                service.kill()
            else:
                service.close()


def free_port() -> int:
    """A port of loopback where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
