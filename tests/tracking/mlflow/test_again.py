"""A service that has lost a run: without its cursor, everything is sent, once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image

from hydraloop.commands import sync
from hydraloop.files.metrics_log import FILENAME
from hydraloop.files.result import Result
from hydraloop.tracking.cursor import Cursor, path_of
from hydraloop.tracking.tracker import MLFLOW
from tests.tracking.mlflow.runs import QUIET, client, empty_database, folder
from tests.tracking.runs import described_run, log_records, track

__all__ = ["empty_database", "folder"]
pytestmark = QUIET


@pytest.fixture
def run_dir(folder: Path) -> Path:
    """A finished run with 30 records and a picture, which MLflow has."""
    run_dir = folder / "outputs" / "run"
    described_run(run_dir)
    log_records(run_dir, 30)
    Image.new("RGB", (8, 8), "red").save(run_dir / "a.png")
    shown = {"kind": "image", "name": "predictions", "path": "a.png"}
    with (run_dir / FILENAME).open("a") as file:
        file.write(
            json.dumps({"mode": "val", "epoch": 1, "iteration": 300, "objects": [shown], "timestamp": 7.5}) + "\n"
        )
    Result("finished").write(run_dir)
    options = {"system_metrics": False, "tracking_uri": None, "folder": str(folder)}
    track(run_dir, "mlflow", MLFLOW, options)
    assert sync.send_all([folder / "outputs"]) == 0
    return run_dir


def check(run_dir: Path) -> None:
    """MLflow has the run, and all of it once."""
    cursor = Cursor.load(run_dir, "mlflow")
    assert cursor is not None
    assert (cursor.sent, cursor.complete) == (31, True)
    run_id = cursor.memory["run_id"]
    assert client().get_run(run_id).info.status == "FINISHED"
    history = client().get_metric_history(run_id, "train/loss")
    assert sorted((metric.step, metric.value) for metric in history) == [(10 * n, 1 / (10 * n)) for n in range(1, 31)]
    images = [one.path for one in client().list_artifacts(run_id, "images") if one.path.endswith(".png")]
    assert len(images) == 1


def test_a_service_that_has_lost_the_run_gets_all_again(folder: Path, run_dir: Path, empty_database: Path) -> None:
    shutil.copy(empty_database, folder / "mlflow.db")
    path_of(run_dir, "mlflow").unlink()
    assert sync.send_all([run_dir]) == 0
    check(run_dir)


def test_a_service_that_still_has_the_run_gets_nothing_twice(run_dir: Path) -> None:
    path_of(run_dir, "mlflow").unlink()
    assert sync.send_all([run_dir]) == 0
    check(run_dir)
