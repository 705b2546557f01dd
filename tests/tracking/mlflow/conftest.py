"""MLflow is set up in every test as in a follower, whose process it has to itself."""

from __future__ import annotations

import pytest

from tests.tracking.mlflow.runs import set_up


@pytest.fixture(autouse=True)
def _set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    set_up(monkeypatch)
