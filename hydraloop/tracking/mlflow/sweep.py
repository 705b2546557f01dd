"""The parent run of a sweep at MLflow: created by the first process that needs it, closed with its jobs' results."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from hydraloop.run import atomic
from hydraloop.run.metric_rules import GREATER_KEYS, LESS_KEYS, by_keys
from hydraloop.run.record_log import FILENAME as RECORDS_FILE
from hydraloop.run.record_log import Position, Reader
from hydraloop.tracking import description
from hydraloop.tracking.follower import cursor as cursors
from hydraloop.tracking.follower.locks import FOLDER
from hydraloop.tracking.kinds import MLFLOW
from hydraloop.tracking.mlflow import address, runs
from hydraloop.tracking.mlflow.calls import Calls
from hydraloop.tracking.mlflow.files import result_of
from hydraloop.tracking.mlflow.names import clean
from hydraloop.tracking.tracker import Run, Sweep

if TYPE_CHECKING:
    from mlflow import MlflowClient

FILENAME = "mlflow.json"
"""File in `<sweep>/tracking/` with the parent runs, one for each address and experiment."""
_PATIENCE = 120.0
"""Seconds to wait for another process that creates the parent run."""
_CHECKPOINT = "default_hooks.checkpoint"


def ensure_parent(
    options: Mapping[str, Any],
    sweep: Sweep,
    experiment: str,
    *,
    client: MlflowClient | None = None,
    uri: str | None = None,
) -> str:
    """Return the id of a sweep's parent run. The first process that asks creates it, and the database.

    Args:
        options: the hook's options.
        sweep: the sweep.
        experiment: name of the experiment if the options do not have one.
        client: a client for `uri`; None: one for the address in the options.

    Raises:
        UnusableError: a parent run cannot be created with these options.
    """
    options = runs.without_secrets(options)
    name = runs.experiment_name(options, experiment)
    uri = address.address_of(options, {}) if uri is None else uri
    path = sweep.folder / FOLDER / FILENAME
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock", timeout=_PATIENCE):
        parents = _read(path)
        for parent in parents:
            if (parent["tracking_uri"], parent["experiment"]) == (address.shown(uri), name):
                return str(parent["run_id"])
        with Calls(lambda: False)():
            client = address.connected(uri) if client is None else client
            experiment_id = runs.experiment_of(client, name, uri)
            run_id = runs.find(client, experiment_id, sweep.uid)
            if run_id is None:
                tags = runs.parent_tags(sweep, options["tags"])
                run_id = runs.create(client, experiment_id, _name(sweep), tags, time())
        parents.append({"tracking_uri": address.shown(uri), "experiment": name, "run_id": run_id})
        atomic.write_text(path, json.dumps(parents, indent=1) + "\n")
    return run_id


def _name(sweep: Sweep) -> str:
    """Return the parent run's name. A directory without a date may be used by several sweeps, so an id is added."""
    return sweep.name if sweep.name[:4].isdigit() else f"{sweep.name}-{sweep.uid[:6]}"


def finish_parent(options: Mapping[str, Any], folder: Path, *, jobs: int = 0, interrupted: bool = False) -> None:
    """Close the parent runs of the sweep in a directory. May be repeated.

    Each job's final value of the metric that the sweep optimizes is a point of the parent run, with the job's number as
    step. Tags name the best job.

    Args:
        options: the hook's options.
        folder: directory of the sweep.
        jobs: number of jobs with this tracker. If fewer have begun, the sweep counts as failed.
        interrupted: whether the sweep was interrupted.
    """
    folder = folder.absolute()
    begun = len(_cursors(folder))
    cut_short = "KILLED" if interrupted else "FAILED" if begun < jobs else None
    children = sorted(_children(folder), key=lambda child: child.job)
    for parent in _read(folder / FOLDER / FILENAME):
        uri = address.address_of(options, {})
        if address.shown(uri) != parent["tracking_uri"]:
            if options.get("tracking_uri") is not None:
                continue
            uri = parent["tracking_uri"]
        with Calls(lambda: False)():
            among = [child for child in children if child.parent_of(parent)]
            _finish(address.connected(uri), parent["run_id"], among, cut_short)


def _finish(client: MlflowClient, parent: str, children: list[_Child], cut_short: str | None) -> None:
    from mlflow.entities import Metric

    scored = [child for child in children if child.metric]
    metrics = [Metric(clean(child.metric), child.value, child.ended, child.job) for child in scored]
    runs.log_points(client, parent, metrics)
    incomplete = [child for child in children if child.status not in ("finished", "stopped")]
    failed = [child for child in incomplete if child.status != "interrupted"]
    tags = {"jobs": str(len(children)), "jobs_failed": str(len(failed)), **_best_tags(scored)}
    for name, value in tags.items():
        client.set_tag(parent, name, runs.tag_value(value))
    ended = max((child.ended for child in children), default=round(time() * 1000))
    client.set_terminated(parent, cut_short or ("FAILED" if incomplete else "FINISHED"), ended)


def _best_tags(scored: list[_Child]) -> dict[str, str]:
    """Return tags with the best child's name, id and value; no tags if the metric's direction is unknown."""
    if not scored:
        return {}
    metric = Counter(child.metric for child in scored).most_common(1)[0][0]
    among = [child for child in scored if child.metric == metric and math.isfinite(child.value)]
    higher = next((child.higher for child in among if child.higher is not None), by_keys(metric))
    if higher is None or not among:
        return {}
    best = (max if higher else min)(among, key=lambda child: child.value)
    return {
        "best_child": best.name,
        "best_child_run_id": best.run_id,
        "best_child_job": str(best.job),
        "best_child_metric": metric,
        "best_child_value": repr(best.value),
    }


@dataclass(frozen=True, slots=True)
class _Child:
    """The result of a sweep's job."""

    job: int
    name: str
    run_id: str
    experiment: str
    status: str
    metric: str
    """The metric that the sweep optimizes; empty if there is none."""
    value: float
    higher: bool | None
    """Whether higher values are better; None if this run does not tell."""
    ended: int
    """When the job ended, in milliseconds since 1970."""

    def parent_of(self, parent: Mapping[str, Any]) -> bool:
        """Return whether a parent run is this child's."""
        return bool(parent["experiment"] == self.experiment)


def _children(folder: Path) -> Iterator[_Child]:
    for run, job, cursor in _cursors(folder):
        if "run_id" in cursor.memory:
            yield _child(run, job, cursor)


def _cursors(folder: Path) -> list[tuple[Run, int, cursors.Cursor]]:
    """Return, for each job that has begun, the run, the job's number and this tracker's cursor."""
    begun = []
    for run_dir in sorted({path.parent.parent for path in folder.rglob(f"{FOLDER}/*.cursor.json")}):
        run = description.read(run_dir)
        if run is None or run.sweep is None or run.sweep.folder != folder:
            continue
        for name in cursors.hook_names(run_dir):
            found = cursors.Cursor.load(run_dir, name)
            if found is not None and found.kind == MLFLOW:
                begun.append((run, run.sweep.job, found))
    return begun


def _child(run: Run, job: int, cursor: cursors.Cursor) -> _Child:
    path = result_of(run)
    result: dict[str, Any] = {}
    ended = round(run.attempt.began * 1000)
    if path is not None:
        with suppress(OSError, ValueError):
            result = json.loads(path.read_text(encoding="utf-8"))
            ended = round(path.stat().st_mtime * 1000)
    best = result.get("best") or {}
    metric, value = best.get("metric", ""), best.get("value", "nan")
    if not best:
        metric, value = next(iter((result.get("val_metrics") or {"": "nan"}).items()))
    return _Child(
        job=job,
        name=run.name,
        run_id=str(cursor.memory["run_id"]),
        experiment=cursor.options.get("experiment") or run.experiment,
        status=result.get("status", "killed"),
        metric=metric,
        value=float(value),  # JSON has no NaN, so it is the string "nan"
        higher=_higher(run, metric, best.get("value")),
        ended=ended,
    )


def _higher(run: Run, metric: str, best: float | None) -> bool | None:
    """Return whether higher values of a metric are better: from the options, else from the best value, else its name.

    A metric object may have declared it during training; only the choice of the best checkpoint shows that.
    """
    params = run.attempt.params
    rule = params.get(f"{_CHECKPOINT}.rule")
    if rule is not None:
        return rule == "greater"
    greater, less = _listed(run, "greater_keys"), _listed(run, "less_keys")
    found = by_keys(metric, greater or (), less or ())
    if found is None and isinstance(best, int | float):
        found = _shown_by(run.run_dir / RECORDS_FILE, metric, best)
    return by_keys(metric, greater or GREATER_KEYS, less or LESS_KEYS) if found is None else found


def _listed(run: Run, name: str) -> list[str]:
    start = f"{_CHECKPOINT}.{name}."
    return [str(value) for key, value in run.attempt.params.items() if key.startswith(start)]


def _shown_by(path: Path, metric: str, best: float) -> bool | None:
    """Return whether the best validation had the highest value (True) or the lowest (False); None if undecided."""
    records, _ = Reader(path, Position()).read(1 << 62)
    values = [record.values[metric] for record in records if record.mode == "val" and metric in record.values]
    values = [value for value in values if math.isfinite(value)]
    if len(set(values)) < 2 or best not in (max(values), min(values)):
        return None
    return best == max(values)


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    return found
