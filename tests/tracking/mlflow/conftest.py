"""MLflow is set up in every test as in a follower, whose process it has to itself."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.tracking.mlflow.runs import set_up


@pytest.fixture(autouse=True)
def _set_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = gc.get_threshold()
    set_up(monkeypatch)
    yield
    gc.set_threshold(*before)
