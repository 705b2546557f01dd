"""Tracking services with faults: an MLflow server, one that is silent, one that is slow, a small disk.

They stand for other machines, so they have a lower priority than training, whose speed is measured at the same time.
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
"""Most seconds for the start of a server, which imports for several seconds on a busy machine."""


class MLflowServer:
    """An `mlflow server` on a loopback port that stays the same, with an SQLite database in a folder."""

    def __init__(self, folder: Path, *, port: int | None = None) -> None:
        self.folder, self.port = folder, port or free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def uri(self) -> str:
        """Address of the server."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def database(self) -> Path:
        """Path of its database, which can be read while the server is down."""
        return self.folder / "mlflow.db"

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        self.begin()
        deadline = time.monotonic() + _LONGEST_START
        while not self._answers():
            assert self._process is not None, "it was begun"
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((self.folder / "server.log").read_text(encoding="utf-8")[-4000:])
            time.sleep(0.1)

    def begin(self) -> None:
        """Start the server without waiting."""
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
        """Kill the server and its workers with `kill -9`."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), urlopen(f"{self.uri}/health", timeout=5) as answer:
            return bool(answer.status == 200)
        return False


class Proxy:
    """Forwards connections to a port after a delay. Without a target, it accepts connections and never answers.

    Args:
        target: a loopback port.
    """

    def __init__(self, target: int | None = None) -> None:
        self.target, self.delay = target, 0.0
        """Seconds before the client's data is forwarded."""
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = int(self._listener.getsockname()[1])
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def uri(self) -> str:
        """Address of the proxy."""
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        """Stop accepting, and end open connections."""
        for one in [self._listener, *self._open]:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # otherwise, a thread that waits in accept or recv would keep it open
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
        """Forward each part after the delay. Parts of one message do not wait for each other."""
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
    """A small file system in memory, mounted in a folder. Needs the right to mount (`in_own_mounts`)."""

    def __init__(self, folder: Path, *, size: str = "48m") -> None:
        self.folder = folder
        folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)

    def fill(self) -> None:
        """Fill the disk completely."""
        with (self.folder / "filler").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(1 << 12))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise

    def empty(self) -> None:
        """Free the space."""
        (self.folder / "filler").unlink()

    def make_read_only(self, read_only: bool) -> None:
        """Make the disk read-only for all users, including root, or writable again."""
        subprocess.run(["mount", "-o", f"remount,{'ro' if read_only else 'rw'}", self.folder], check=True)

    def close(self) -> None:
        """Unmount the disk."""
        subprocess.run(["umount", "--lazy", self.folder], check=True)


_MOUNTS = "HYDRALOOP_OWN_MOUNTS"


def in_own_mounts() -> bool:
    """Restart this script in a mount namespace. Returns True in it, and False if the system does not allow one."""
    if _MOUNTS in os.environ:
        return True
    unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--user", "--map-root-user"]
    try:
        subprocess.run([*unshare, "true"], check=True, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        return False
    os.environ[_MOUNTS] = "1"
    sys.stdout.flush()
    return os.execvp(unshare[0], [*unshare, sys.executable, *sys.argv])  # does not return


@contextlib.contextmanager
def stopped(*services: MLflowServer | Proxy) -> Iterator[None]:
    """Stop the services at the end of the block."""
    try:
        yield
    finally:
        for service in services:
            if isinstance(service, MLflowServer):
                service.kill()
            else:
                service.close()


def free_port() -> int:
    """Return a free loopback port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
