"""What trackers have of a run: in MLflow's database, in W&B's offline files, in TensorBoard's event files."""

from __future__ import annotations

import json
import sqlite3
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.e2e.projects import Run
from tests.tracking.wandb.file import records as serialised

Points = dict[str, list[tuple[int, float]]]
"""Iterations and values in order, by name of the metric."""
_NO_METRICS = ("mode", "epoch", "iteration", "timestamp")
_SPEED = ("eta", "time", "data_time", "samples_per_second", "memory")


def points(run: Run, file: str = "metrics.jsonl") -> Points:
    """What trackers should have of a run: the numbers of its records."""
    found: Points = {}
    for line in (run.path / file).read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        for name, value in record.items():
            if name not in _NO_METRICS and isinstance(value, int | float):
                group = "perf" if record["mode"] == "train" and name in _SPEED else record["mode"]
                found.setdefault(f"{group}/{name}", []).append((record["iteration"], float(value)))
    return found


# MLflow. -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MLflowRun:
    """A run in the tables of MLflow's database; duplicates are kept."""

    uid: str
    name: str
    status: str
    experiment: str
    params: dict[str, str]
    tags: dict[str, str]
    points: Points
    """Without the machine's metrics, `system/…`."""
    latest: dict[str, tuple[int, float]]
    files: Path
    """Folder of its artifacts."""

    @property
    def recorded(self) -> Points:
        """The points without `best/…`, which are sent at the end and are in no record."""
        return {name: line for name, line in self.points.items() if not name.startswith("best/")}

    @property
    def parent(self) -> str | None:
        """The id of its parent run."""
        return self.tags.get("mlflow.parentRunId")


def mlflow_runs(folder: Path) -> list[MLflowRun]:
    """The runs in `mlflow.db` in a folder, in the order they were started in."""
    with closing(sqlite3.connect(f"file:{folder / 'mlflow.db'}?mode=ro", uri=True)) as database:
        return list(_runs(database))


def mlflow_run(folder: Path) -> MLflowRun:
    """The only one."""
    (found,) = mlflow_runs(folder)
    return found


def _runs(database: sqlite3.Connection) -> Iterator[MLflowRun]:
    query = """
        SELECT run_uuid, runs.name, status, experiments.name, artifact_uri
        FROM runs JOIN experiments USING (experiment_id) ORDER BY start_time, run_uuid
    """
    for uid, name, status, experiment, files in database.execute(query).fetchall():

        def of(table: str, columns: str, uid: str = uid) -> list[Any]:
            query = f"SELECT {columns} FROM {table} WHERE run_uuid = ? ORDER BY step, timestamp"
            if "step" not in columns:
                query = query.partition(" ORDER")[0]
            return database.execute(query, (uid,)).fetchall()

        found: Points = {}
        for key, step, value in of("metrics", "key, step, value"):
            if not key.startswith("system/"):
                found.setdefault(key, []).append((step, value))
        yield MLflowRun(
            uid=uid,
            name=name,
            status=status,
            experiment=experiment,
            params=dict(of("params", "key, value")),
            tags=dict(of("tags", "key, value")),
            points=found,
            latest={key: (step, value) for key, step, value in of("latest_metrics", "key, step, value")},
            files=Path(urlsplit(files).path),
        )


# W&B. ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WandbRun:
    """A run in an offline file of W&B's."""

    uid: str
    name: str
    group: str
    project: str
    config: dict[str, Any]
    points: Points
    steps: list[int]
    exit_code: int | None


def wandb_runs(run: Run) -> list[WandbRun]:
    """The files of a run that `wandb sync` would upload."""
    found = [_wandb_run(path) for path in sorted(run.path.glob("wandb/offline-run-*/run-*.wandb"))]
    return [one for one in found if one is not None]


def _wandb_run(path: Path) -> WandbRun | None:
    """Return what a file has; None if W&B has not written the run yet."""
    from wandb.proto.wandb_internal_pb2 import Record

    about: Any = None
    config: dict[str, Any] = {}
    found: Points = {}
    steps: list[int] = []
    exit_code: int | None = None
    for record in (Record.FromString(one) for one in serialised(path)):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            about = record.run
        if kind in ("run", "config"):
            update = record.run.config.update if kind == "run" else record.config.update
            config |= {item.key: json.loads(item.value_json) for item in update}
        elif kind == "exit":
            exit_code = record.exit.exit_code
        elif kind == "history":
            steps.append(record.history.step.num)
            row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            for key, value in row.items():
                if key.startswith(("train/", "val/", "test/", "perf/")):
                    found.setdefault(key, []).append((row["iteration"], value))
    if about is None:
        return None
    return WandbRun(about.run_id, about.display_name, about.run_group, about.project, config, found, steps, exit_code)


# TensorBoard. --------------------------------------------------------------------------------------------------------


def tensorboard_points(run: Run) -> Points:
    """The scalars in the event files of a run, as TensorBoard's own reader finds them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    file = next(run.path.glob("tensorboard/**/events.*"))  # in a folder with the name of a sweep's job
    reader = EventAccumulator(str(file.parent), size_guidance={"scalars": 0})
    reader.Reload()
    return {
        tag.removeprefix("train_") if tag.startswith("train_perf/") else tag: [
            (event.step, event.value) for event in reader.Scalars(tag)
        ]
        for tag in reader.Tags()["scalars"]
    }


def nearly(found: Points) -> dict[str, Counter[tuple[int, str]]]:
    """Points with their values rounded to 32 bits, for comparison."""
    return {
        key: Counter((step, f"{struct.unpack('f', struct.pack('f', value))[0]:.5e}") for step, value in line)
        for key, line in found.items()
    }
