"""Reads back what tracking services have of a run: metrics by name and step, and how often they are there."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wandb_file import records
from wandb_service import Service

from hydraloop.run.record_log import read_all

Points = Counter[tuple[str, int]]
"""Number of times that a metric is there at an iteration."""

PREFIX = "train/"


def wanted(log: Path) -> dict[int, set[str]]:
    """Return what a service should have: by iteration, the metrics of each training record in `metrics.jsonl`."""
    records = [record for record in read_all(log) if record.mode == "train"]
    return {one.iteration: {name for name in one.metrics if name.startswith(PREFIX)} for one in records}


def there(points: Points, wanted: Mapping[int, set[str]]) -> int:
    """Return the number of records that are there with all their metrics."""
    return sum(all(points[name, step] for name in names) for step, names in wanted.items())


def twice(points: Points) -> int:
    """Return the number of steps at which any metric is there more than once."""
    return len({step for (_, step), times in points.items() if times > 1})


def mlflow_points(database: Path) -> Points:
    """Return the points of all runs in an MLflow database. Reads a copy, because the disk may be full or read-only."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    from mlflow import MlflowClient
    from mlflow.entities import ViewType

    points: Points = Counter()
    if not database.exists():
        return points
    with tempfile.TemporaryDirectory() as folder:
        for file in database.parent.glob(f"{database.name}*"):
            if not file.name.endswith(".lock"):
                shutil.copy(file, folder)
        logging.disable(logging.INFO)
        client = MlflowClient(tracking_uri=f"sqlite:///{folder}/{database.name}")
        experiments = [one.experiment_id for one in client.search_experiments(ViewType.ALL)]
        for run in client.search_runs(experiments, run_view_type=ViewType.ALL):
            for name in run.data.metrics:
                if name.startswith(PREFIX):
                    points.update((name, metric.step) for metric in client.get_metric_history(run.info.run_id, name))
    return points


def wandb_points(run_dir: Path) -> Points:
    """Return the points in all W&B files of a run directory that `wandb sync` would upload."""
    from wandb.proto import wandb_internal_pb2 as protocol

    parse: Any = getattr(protocol, "Record").FromString  # noqa: B009 - type checkers do not see generated names
    points: Points = Counter()
    for file in (run_dir / "wandb").glob("*run-*/run-*.wandb"):
        for record in (parse(one) for one in records(file)):
            if record.HasField("history"):
                row = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
                points.update(_of_row(row, int(json.loads(row["iteration"]))))
    return points


def service_points(service: Service) -> Points:
    """Return the points of all runs that a stand-in for W&B has received."""
    points: Points = Counter()
    for rows in service.rows.values():
        for row in rows.values():
            points.update(_of_row(row, int(row["iteration"])))
    return points


def _of_row(row: Mapping[str, Any], iteration: int) -> list[tuple[str, int]]:
    return [(name, iteration) for name in row if name.startswith(PREFIX)]


def tensorboard_points(run_dir: Path) -> Points:
    """Return the points in all event files of a run directory."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    points: Points = Counter()
    folders = {path.parent for path in (run_dir / "tensorboard").rglob("events.out.tfevents.*")}
    for folder in folders:
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0}, purge_orphaned_data=False)
        events.Reload()
        for name in events.Tags()["scalars"]:
            if name.startswith(PREFIX):
                points.update((name, event.step) for event in events.Scalars(name))
    return points
