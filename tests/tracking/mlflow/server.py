"""A real `mlflow server` with SQLite on a free loopback port, and one that accepts and never answers."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydraloop.tracking.mlflow.address import connected
from tests.scripts import load_script

_services: Any = load_script("benchmarks/tracking_services")


class MLflowServer(_services.MLflowServer):  # type: ignore[misc]  # loaded from a file
    """The benchmarks' server, with a database made by hydraloop, which is fast. It can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        with warnings.catch_warnings(action="ignore"):  # of libraries that MLflow uses
            connected(f"sqlite:///{self.database}")


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
