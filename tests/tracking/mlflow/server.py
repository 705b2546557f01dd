"""A real `mlflow server` with SQLite on a free loopback port, and one that accepts and never answers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.request import urlopen

from hydraloop.tracking.mlflow_runs import connected

_LONGEST_START = 120.0
"""Most seconds for the start of a server, which imports for several seconds on a busy machine."""


class MLflowServer:
    """An `mlflow server` on a loopback port that stays the same. It can be killed and started again.

    It stands for another machine, so it has a lower priority than training. hydraloop makes its database quickly.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self._process: subprocess.Popen[bytes] | None = None
        with warnings.catch_warnings(action="ignore"):  # of libraries that MLflow uses
            connected(f"sqlite:///{self.database}")

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
        with suppress(OSError), urlopen(f"{self.uri}/health", timeout=5) as answer:
            return bool(answer.status == 200)
        return False


@contextmanager
def mlflow_server(folder: Path) -> Iterator[MLflowServer]:
    """A started server, which is killed at the end."""
    server = MLflowServer(folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()


@contextmanager
def silent_server() -> Iterator[str]:
    """The address of a server that accepts and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def free_port() -> int:
    """Return a free loopback port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
