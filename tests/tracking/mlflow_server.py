"""A real `mlflow server` over SQLite on a free loopback port, and one that accepts and never answers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from hydraloop.tracking.mlflow_address import prepare_database
from hydraloop.tracking.mlflow_calls import settings

_LONGEST_START = 120.0
"""Seconds: it imports for some, and the machine may be busy."""


class MLflowServer:
    """A server with its database and artifacts in a folder; it may be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, _free_port()
        self._process: subprocess.Popen[bytes] | None = None
        with settings(5):
            prepare_database(self.database)

    @property
    def uri(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def database(self) -> str:
        """The address of its database, which can be read while it is down."""
        return f"sqlite:///{self.folder}/mlflow.db"

    def start(self) -> None:
        """Start it and wait until it answers."""
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--workers", "1", "--backend-store-uri", self.database]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
        quick = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (self.folder / "server.log").open("ab") as output:
            self._process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=environment | quick,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        deadline = time.monotonic() + _LONGEST_START
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((self.folder / "server.log").read_text(encoding="utf-8")[-4000:])
            time.sleep(0.1)

    def kill(self) -> None:
        """`kill -9` of it and its workers."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        try:
            with urlopen(f"{self.uri}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (URLError, OSError):
            return False


@contextmanager
def mlflow_server(folder: Path) -> Iterator[MLflowServer]:
    """A started server; it is killed at the end."""
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
