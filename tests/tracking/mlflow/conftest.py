"""MLflow is set up in every test as in a follower, whose process it has to itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tracking.mlflow.runs import set_up
from tests.tracking.mlflow.server import MLflowServer, mlflow_server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MLflowServer]:
    """A server of all tests here, because it takes seconds to start. Each test uses an experiment of its own."""
    with mlflow_server(tmp_path_factory.mktemp("server")) as started:
        yield started


@pytest.fixture(autouse=True)
def _set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    set_up(monkeypatch)
