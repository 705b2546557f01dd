"""The parent run of a sweep at MLflow. The sender of each job creates it, and updates it when the job has ended.

It shows the value of the best job and a table of the jobs. The page of the experiment gets a view of them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from hydraloop.run_files import atomic
from hydraloop.tracking import run_description
from hydraloop.tracking.mlflow import address, runs
from hydraloop.tracking.mlflow.runs import clean
from hydraloop.tracking.tracker import FOLDER, Ending, GoneError, Run, Sweep

if TYPE_CHECKING:
    from mlflow import MlflowClient

FILENAME = "mlflow.json"
"""File in `<sweep>/tracking/` with the parent runs, one for each address and experiment, and what is known of their
jobs. The lock next to it is held while a parent run is created or updated."""
_PATIENCE = 120.0
"""Seconds to wait for another process that creates or updates the parent run."""
_RUNNING = "running"
"""Status of a job that has not ended."""
_MOST_ROWS = 60
"""Most rows of the table: a description may have 8,000 characters."""

_Job = Mapping[str, Any]
"""What is known of a job: `values` (swept, by key), `status`, `metric`, `rule`, `value` (null: none) and `seconds`."""


def ensure_parent(client: MlflowClient, uri: str, run: Run, experiment_id: str, tags: Mapping[str, Any]) -> str:
    """Return the id of the parent run of a sweep's job, which is created if necessary, with the user's tags."""
    with _parent(run, uri, experiment_id) as (parent, sweep):
        parent["jobs"].setdefault(str(sweep.job), _job_of(run, _RUNNING))
        given = {"sweep": sweep.name, "sweep_dir": sweep.folder, **tags}
        began = run.attempts[0].began if sweep.began is None else sweep.began
        return runs.ensure(client, experiment_id, sweep.uid, sweep.name.rpartition("/")[2], given, began)


def update_parent(client: MlflowClient, uri: str, run: Run, experiment_id: str, status: Ending) -> None:
    """Add a job that has ended to its parent run: value of the best job, table of the jobs, and status."""
    with _parent(run, uri, experiment_id) as (parent, sweep):
        parent["jobs"][str(sweep.job)] = job = _job_of(run, status)
        _send(client, parent, sweep)
        if job["metric"] is not None:
            key, view = _view(job, run)
            page = f"experiments/{experiment_id}/runs?workflowType=machine_learning&viewStateShareKey={key}"
            if parent.get("page") != page:
                client.set_experiment_tag(experiment_id, f"mlflow.sharedViewState.{key}", view)  # in the menu *Views*
                parent["page"] = page


def update_parents(folder: Path) -> None:
    """Send the parent runs of the sweep in a directory again: the last job may have ended before the sweep did.

    Raises:
        Exception: that of the last parent run that could not be sent. The others are sent.
    """
    sweep, problem = run_description.read_sweep(folder), None
    if sweep is None or not (folder / FOLDER / FILENAME).exists():
        return
    with _parents(folder) as parents:
        for parent in parents:
            uri = address.with_password(parent["tracking_uri"])
            path = address.sqlite_path(uri)
            try:
                if path is not None and not path.exists():
                    raise GoneError(f"{path} does not exist any more")
                _send(address.connected(uri), parent, sweep)
            except Exception as error:
                problem = error
    if problem is not None:
        raise problem


def has_open_parent(folder: Path) -> bool:
    """Return whether a parent run of the sweep in a directory has the status RUNNING."""
    return any(parent.get("status", "RUNNING") == "RUNNING" for parent in _read(folder / FOLDER / FILENAME))


def pages(folder: Path) -> list[str]:
    """Return lines that say where the jobs of the sweep in a directory are shown, best first."""
    found = [one for one in _read(folder / FOLDER / FILENAME) if "page" in one]
    shown = [address.page(one["tracking_uri"], Path.cwd(), one["page"]) for one in found]
    return [f"mlflow: the jobs, best first: {page}" for page in shown if page is not None]


def _read(path: Path) -> list[dict[str, Any]]:
    parents: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return parents


@contextmanager
def _parents(folder: Path) -> Iterator[list[dict[str, Any]]]:
    """Hold the lock in the body, and write what the body has changed unless it raises."""
    path = folder / FOLDER / FILENAME
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock", timeout=_PATIENCE):
        parents = _read(path)
        yield parents
        atomic.write_text(path, json.dumps(parents, indent=1) + "\n")


@contextmanager
def _parent(run: Run, uri: str, experiment_id: str) -> Iterator[tuple[dict[str, Any], Sweep]]:
    """Lock and yield what is known of the parent run of a job, and the sweep. The body may change it.

    A job that has moved from another address leaves its parent run there, which is forgotten without jobs.
    """
    sweep, place = run.sweep, {"tracking_uri": address.shown(uri), "experiment_id": experiment_id}
    assert sweep is not None, "the run is a job of a sweep"
    with _parents(sweep.folder) as parents:
        others = [one for one in parents if not one.items() >= place.items()]
        for other in others:
            other["jobs"].pop(str(sweep.job), None)
        parent = next((one for one in parents if one not in others), {**place, "jobs": {}})
        yield parent, sweep
        parents[:] = [*(one for one in others if one["jobs"]), parent]


def _send(client: MlflowClient, parent: dict[str, Any], sweep: Sweep) -> None:
    """Send what is known of the jobs. A parent run that was deleted is created again by the next job."""
    from mlflow.entities import Metric, RunTag

    jobs: dict[str, _Job] = parent["jobs"]
    run_id = runs.find(client, parent["experiment_id"], sweep.uid)
    if run_id is None:
        return
    metric, order = _best_first(jobs)
    ended = sum(job["status"] != _RUNNING for job in jobs.values())
    best = [] if metric is None else [Metric(clean(f"val/{metric}"), jobs[order[0]]["value"], _now(), ended)]
    client.log_batch(run_id, best, tags=[RunTag(runs.NOTE, _table(jobs, order, metric))])
    parent["status"] = status = _status(jobs, sweep)
    if status == "RUNNING":
        client.update_run(run_id, status=status)
    else:
        client.set_terminated(run_id, status, _now())


def _status(jobs: Mapping[str, _Job], sweep: Sweep) -> str:
    """Return the status of the parent run: RUNNING until all jobs have ended, or no more are started."""
    sweep = run_description.read_sweep(sweep.folder) or sweep
    statuses = {job["status"] for job in jobs.values()}
    begun = max(len(jobs), len([*sweep.folder.glob("*/result.json")]))  # also jobs without this tracker
    incomplete = sweep.jobs is None or begun < sweep.jobs
    if _RUNNING in statuses or (incomplete and run_description.is_controlled(sweep)):
        return "RUNNING"
    if "interrupted" in {sweep.ended, *statuses} or (incomplete and sweep.ended is None):
        return "KILLED"
    return "FAILED" if sweep.ended == "failed" or statuses & {"failed", "killed"} else "FINISHED"


def _job_of(run: Run, status: str) -> _Job:
    """Describe a job, with its objective if it has ended and it is known which values are better."""
    typed, axes = run_description.override_values(run.run_dir), () if run.sweep is None else run.sweep.axes
    result = run_description.result_of(run.run_dir, run.attempt)
    objective = result.get("objective") or {}
    if objective.get("rule") is None:
        objective = {}
    value = float(objective.get("value", "nan"))
    return {
        "values": {key: text for key, text in typed.items() if key in axes or not axes},
        "status": status,
        "metric": objective.get("metric"),
        "rule": objective.get("rule"),
        "value": value if math.isfinite(value) else None,
        "seconds": result.get("seconds"),
    }


def _best_first(jobs: Mapping[str, _Job]) -> tuple[str | None, list[str]]:
    """Return the metric by which jobs are compared (None without one) and the numbers of the jobs in order.

    Jobs without a value of that metric come last.
    """
    first = next((job for job in jobs.values() if job["value"] is not None), {"metric": None, "rule": None})
    metric, sign = first["metric"], -1 if first["rule"] == "greater" else 1

    def rank(number: str) -> tuple[float, int]:
        value = jobs[number]["value"] if jobs[number]["metric"] == metric else None
        return math.inf if value is None else sign * value, int(number)

    return metric, sorted(jobs, key=rank)


def _table(jobs: Mapping[str, _Job], order: Sequence[str], metric: str | None) -> str:
    """Return a Markdown table of jobs."""
    keys = dict.fromkeys(key for number in order for key in jobs[number]["values"])
    short = run_description.short_keys(keys)
    header = ["job", *(short[key] for key in keys), *([f"val/{metric}"] if metric else []), "status", "time"]
    lines = [_line(header), "| --- " * len(header) + "|"]
    for number in order[:_MOST_ROWS]:
        job = jobs[number]
        value = "" if job["value"] is None or job["metric"] != metric else f"{job['value']:.5g}"
        took = "" if job["seconds"] is None else timedelta(seconds=round(job["seconds"]))
        values = [job["values"].get(key, "") for key in keys]
        lines.append(_line([number, *values, *([value] if metric else []), job["status"], took]))
    rest = len(order) - _MOST_ROWS
    return "\n".join(lines) + (f"\n\n… and {rest} more" if rest > 0 else "")


def _line(cells: Iterable[object]) -> str:
    # MLflow's page has no space between two columns; Markdown keeps a non-breaking one.
    return "| " + " | ".join(str(cell).replace("|", "\\|") + "\u00a0" for cell in cells) + " |"


def _view(job: _Job, run: Run) -> tuple[str, str]:
    """Return the key and content of a view of the experiment's page, best runs first.

    It has the monitored metric and the swept values, which MLflow's default columns do not show. Sweeps over the same
    keys share a view.
    """
    short, metric = run_description.short_keys(job["values"]), f"val/{job['metric']}"
    params = runs.params_of(run.attempt.params)
    name = f"{metric} by {', '.join(short.values())}" if short else metric
    column = f"metrics.`{clean(metric)}`"
    columns = [column, *(f"params.`{clean(axis)}`" for axis in short if axis in params)]
    state = {"orderByKey": column, "orderByAsc": job["rule"] == "less", "selectedColumns": columns}
    content = {"name": name, "createdAt": _now(), "updatedAt": _now(), "state": json.dumps(state)}
    return re.sub(r"\W+", "-", name)[:100], json.dumps(content)


def _now() -> int:
    """Return the time in milliseconds."""
    return round(time() * 1000)
