"""MLflowTracker with a real server on loopback. One that is down is in tests/e2e/trackers."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from hydraloop.run_files.record_log import LoggedObject, Record
from hydraloop.tracking.mlflow.tracker import MLflowTracker
from hydraloop.tracking.tracker import Finish, GoneError, UnusableError
from tests.tracking.mlflow.runs import (
    BEGAN,
    QUIET,
    client,
    empty_database,
    folder,
    found,
    opened,
    points,
    run_in,
    send_files,
    training,
)
from tests.tracking.mlflow.server import MLflowServer

__all__ = ["empty_database", "folder"]
pytestmark = QUIET


@pytest.mark.slow
def test_a_server(tmp_path: Path, server: MLflowServer) -> None:
    uri = server.uri
    run = run_in(tmp_path / "run")
    tracker = opened(run, tracking_uri=uri)
    values = {"loss": math.nan, "up": math.inf, "fine": 0.1 + 0.2, "top@5": 1.0}
    records = training(0, 600, **values)
    tracker.send(records)
    tracker.send(records)
    assert points(tracker, "train/fine", uri) == [(10 * i, 0.1 + 0.2) for i in range(600)]
    from PIL import Image

    Image.new("RGB", (8, 8)).save(run.run_dir / "p.png")
    picture = Record(600, "val", 1, 20, BEGAN, {}, {}, (LoggedObject("image", "val/predictions", "p.png"),))
    tracker.send([picture])
    tracker.finish(Finish("failed", "ValueError: no"))
    send_files(tracker)
    assert found(tracker, uri).info.status == "FAILED"
    listed = [info.path for info in client(uri).list_artifacts(tracker.memory["run_id"])]
    assert listed == ["config.yaml", "images"]
    experiment, run_id = tracker.memory["experiment_id"], tracker.memory["run_id"]
    assert tracker.where == f"{uri}/#/experiments/{experiment}/runs/{run_id}?workflowType=machine_learning"

    second = replace(run, attempts=(*run.attempts, replace(run.attempt, number=1, iteration=3000)))
    again = MLflowTracker({"system_metrics": False, "tracking_uri": uri}, second, tracker.memory)
    again.rewound(301)
    again.open()
    again.send(training(301, 650, index=301, later=60.0, **values))
    for key in ("train/fine", "train/loss", "train/up"):
        assert [step for step, _ in points(again, key, uri)] == [10 * i for i in range(650)]

    client(uri).delete_run(run_id)
    with pytest.raises(GoneError, match="does not have run"):
        again.send(training(650, 651, index=650))
    client(uri).delete_experiment(experiment)
    with pytest.raises(UnusableError, match="experiment_name"):
        opened(run_in(tmp_path / "other", uid="other"), tracking_uri=uri)
