"""Runs, records and trackers for the tests of MLflow, and what MLflow's client reads back."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hydraloop.files.metrics_log import Record
from hydraloop.tracking.mlflow import DEFAULTS, MLflowTracker, prepare
from hydraloop.tracking.mlflow_runs import connected, unsynced
from hydraloop.tracking.tracker import Attempt, Run

if TYPE_CHECKING:  # else each process of the tests imports MLflow, which takes seconds
    from mlflow import MlflowClient
    from mlflow.entities import Run as MLflowRun

QUIET = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
"""MLflow's client uses deprecated functions of SQLAlchemy and others; for `pytestmark`."""
BEGAN = 1_700_000_000.5


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty database to copy, because MLflow takes seconds to create one."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    with pytest.MonkeyPatch.context() as patch:
        set_up(patch)
        connected(f"sqlite:///{path}")
    return path


def set_up(patch: pytest.MonkeyPatch) -> None:
    """Prepare MLflow as in a follower. The environment is restored."""
    for name, value in {**DEFAULTS, "MLFLOW_ENABLE_ASYNC_LOGGING": "false"}.items():
        patch.setenv(name, value)
    with warnings.catch_warnings():
        prepare()


@pytest.fixture
def folder(tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with an empty `mlflow.db`, which is the working directory. Databases do not wait for the disk."""
    shutil.copy(empty_database, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    set_up(monkeypatch)
    with unsynced():
        yield tmp_path


def attempt(number: int = 0, iteration: int = 0, config: str = "a: 1\n", **params: Any) -> Attempt:
    """The n-th attempt, a minute after the previous one."""
    tags = {"command": "python train.py a=1", "git_commit": "c0ffee", "host": "here", "world_size": "1", "user": "me"}
    return Attempt(number, iteration, {"a": 1, **params}, config, tags, BEGAN + 60 * number, 100 + number)


def run_in(path: Path, *attempts: Attempt, **fields: Any) -> Run:
    """A run in a directory."""
    path.mkdir(parents=True, exist_ok=True)
    return Run(
        path, fields.pop("uid", "uid0"), "digits", fields.pop("name", "a/run"), attempts or (attempt(),), **fields
    )


def training(first: int, last: int, *, index: int = 0, later: float = 0.0, **values: float) -> list[Record]:
    """Records of every tenth iteration, from `10 * first` on, with times that are `later` seconds later."""
    return [
        Record(index + n, "train", 1, 10 * i, BEGAN + i + later, values or {"loss": 1 / (i + 1), "lr": 0.1}, {})
        for n, i in enumerate(range(first, last))
    ]


def opened(run: Run, memory: dict[str, Any] | None = None, **options: Any) -> MLflowTracker:
    """A tracker that has opened a run, without system metrics by default."""
    tracker = MLflowTracker({"system_metrics": False, **options}, run, {} if memory is None else memory)
    tracker.open()
    return tracker


def client(uri: str | None = None) -> MlflowClient:
    """A client of the database in the working directory, or of another address."""
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri or f"sqlite:///{Path.cwd()}/mlflow.db")


def found(tracker: MLflowTracker, uri: str | None = None) -> MLflowRun:
    """The tracker's run at MLflow."""
    return client(uri).get_run(tracker.memory["run_id"])


def points(tracker: MLflowTracker, key: str, uri: str | None = None) -> list[tuple[int, float]]:
    """Step and value of each point of a metric, in order."""
    history = client(uri).get_metric_history(tracker.memory["run_id"], key)
    return sorted((metric.step, metric.value) for metric in history)


def artifacts(tracker: MLflowTracker, path: str | None = None) -> list[str]:
    """Names of a run's artifacts."""
    return sorted(info.path for info in client().list_artifacts(tracker.memory["run_id"], path))


def stored(tracker: MLflowTracker, name: str) -> Path:
    """The file of an artifact of a run in a local database."""
    return Path(found(tracker).info.artifact_uri) / name


def text(tracker: MLflowTracker, name: str) -> str:
    """The contents of an artifact."""
    return stored(tracker, name).read_text(encoding="utf-8")


def send_files(tracker: MLflowTracker) -> None:
    """Send all files that are due, as the follower does."""
    while tracker.send_file():
        pass
