"""The parent run of a sweep at MLflow. The follower of each job creates it, and updates it when the job has ended."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from hydraloop.run import atomic
from hydraloop.tracking import description
from hydraloop.tracking.follower.cursor import FOLDER
from hydraloop.tracking.mlflow import address, runs
from hydraloop.tracking.mlflow.names import clean
from hydraloop.tracking.tracker import Ending, Run, Sweep

if TYPE_CHECKING:
    from mlflow import MlflowClient

FILENAME = "mlflow.json"
"""File in `<sweep>/tracking/` with the parent runs, one for each address and experiment, and what is known of their
jobs. The lock next to it is held while a parent run is created or updated."""
_PATIENCE = 120.0
"""Seconds to wait for another process that creates or updates the parent run."""
_MOST_ROWS = 100
"""Most rows of the table. MLflow's limit for a description allows about as many."""
_LONGEST_NOTE = 4900
"""Most characters of the table, which is stored in a tag."""
_VIEW = "mlflow.sharedViewState."
"""Tag of an experiment with a view of its page: columns and order. MLflow lists it in the menu *Views*."""


def ensure_parent(client: MlflowClient, uri: str, run: Run, experiment_id: str, tags: Mapping[str, Any]) -> str:
    """Return the id of the parent run of a sweep's job, which is created if necessary. Called before the job's run is.

    Args:
        client: a client for the tracking URI `uri`.
        run: the job.
        experiment_id: the experiment of the job.
        tags: additional tags of a new parent run.
    """
    sweep = _sweep(run)
    with _parents(sweep.folder) as parents:
        parent = _find(parents, uri, experiment_id)
        if parent is None:
            parent = {"tracking_uri": address.shown(uri), "experiment_id": experiment_id, "jobs": {}}
            parents.append(parent)
        found = runs.find(client, experiment_id, sweep.uid)
        if found is None:
            name = sweep.name.rpartition("/")[2]
            began = run.attempts[0].began if sweep.began is None else sweep.began
            found = runs.create(client, experiment_id, name, runs.parent_tags(sweep, tags), began)
        parent["jobs"].setdefault(str(sweep.job), {"name": run.name, "values": _values(run), "status": "running"})
        return found


def update_parent(client: MlflowClient, uri: str, run: Run, experiment_id: str, run_id: str, status: Ending) -> None:
    """Add a job that has ended to its parent run: value of the best job, table of the jobs, tags and status.

    Called when the job's final values and status are sent. May be repeated.

    Args:
        client, uri, run, experiment_id: as for `ensure_parent`.
        run_id: the job's run at MLflow.
        status: how the job ended.
    """
    sweep = _sweep(run)
    with _parents(sweep.folder) as parents:
        parent = _find(parents, uri, experiment_id)
        if parent is not None:
            parent["jobs"][str(sweep.job)] = _job(run, run_id, status)
            _send(client, parent, sweep)
            _save_view(client, parent, run)


def update_parents(folder: Path) -> None:
    """Send the parent runs of the sweep in a directory again: the last job may have ended before the sweep did."""
    sweep, now = description.read_sweep(folder), os.environ.get("MLFLOW_TRACKING_URI", "")
    if sweep is None or not (folder / FOLDER / FILENAME).exists():
        return
    with _parents(folder) as parents:
        for parent in parents:
            uri = parent["tracking_uri"]  # without a password, which may be in the environment
            _send(address.connected(now if address.shown(now) == uri else uri), parent, sweep)


def has_open_parent(folder: Path) -> bool:
    """Return whether a parent run of the sweep in a directory has the status RUNNING."""
    return any(parent.get("status", "RUNNING") == "RUNNING" for parent in _read(folder / FOLDER / FILENAME))


def pages(folder: Path) -> list[str]:
    """Return lines that say where the jobs of the sweep in a directory are shown, best first."""
    lines = []
    for parent in _read(folder / FOLDER / FILENAME):
        uri, page = parent["tracking_uri"], parent.get("page")
        if page is not None and uri.startswith("sqlite:"):
            command = address.command(uri, Path.cwd())
            lines.append(f"mlflow: the jobs, best first: `{command}`, then http://127.0.0.1:5000{page}")
        elif page is not None:
            lines.append(f"mlflow: the jobs, best first: {uri.rstrip('/')}{page}")
    return lines


def _read(path: Path) -> list[dict[str, Any]]:
    parents: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return parents


def _sweep(run: Run) -> Sweep:
    assert run.sweep is not None, "the run is a job of a sweep"
    return run.sweep


@contextmanager
def _parents(folder: Path) -> Iterator[list[dict[str, Any]]]:
    """Hold the lock in the body, and write what the body has changed unless it raises."""
    path = folder / FOLDER / FILENAME
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock", timeout=_PATIENCE):
        parents = _read(path)
        yield parents
        atomic.write_text(path, json.dumps(parents, indent=1) + "\n")


def _find(parents: list[dict[str, Any]], uri: str, experiment_id: str) -> dict[str, Any] | None:
    wanted = (address.shown(uri), experiment_id)
    return next((one for one in parents if (one["tracking_uri"], one["experiment_id"]) == wanted), None)


def _values(run: Run) -> dict[str, str]:
    """Return the job's swept values, by key; all overrides if the swept keys are unknown."""
    typed, axes = description.override_values(run.run_dir), _sweep(run).axes
    return {key: value for key, value in typed.items() if key in axes or not axes}


def _job(run: Run, run_id: str, status: Ending) -> dict[str, Any]:
    """Return what the parent run says of a job."""
    result = description.result_of(run.run_dir, run.attempt)
    monitor, best = result.get("monitor") or {}, result.get("best") or {}
    metric = monitor.get("metric")
    value = float(best.get("value", (result.get("val_metrics") or {}).get(metric, "nan")))
    return {
        "name": run.name,
        "values": _values(run),
        "status": status,
        "run_id": run_id,
        "metric": metric,
        "rule": monitor.get("rule"),
        "value": value if math.isfinite(value) else None,
        "seconds": result.get("seconds"),
    }


def _send(client: MlflowClient, parent: dict[str, Any], sweep: Sweep) -> None:
    """Send what is known of the jobs. A parent run that was deleted is created again by the next job."""
    from mlflow.entities import Metric, RunTag

    jobs: dict[str, dict[str, Any]] = parent["jobs"]
    run_id = runs.find(client, parent["experiment_id"], sweep.uid)
    if run_id is None:
        return
    ended = [job for job in jobs.values() if job["status"] != "running"]
    metrics = Counter((job["metric"], job["rule"]) for job in ended if job["value"] is not None)
    metric, rule = metrics.most_common(1)[0][0] if metrics else (None, None)
    scored = [number for number, job in jobs.items() if job.get("value") is not None and job["metric"] == metric]
    scored.sort(key=lambda number: jobs[number]["value"], reverse=rule == "greater")
    ranked = [*scored, *sorted(jobs.keys() - set(scored), key=int)]
    failed = sum(job["status"] in ("failed", "killed") for job in ended)
    tags = {"jobs": str(len(jobs)), "jobs_failed": str(failed), "mlflow.note.content": _table(jobs, ranked, metric)}
    now, points = round(time() * 1000), []
    if scored:
        best = jobs[scored[0]]
        tags |= {"best_child": best["name"], "best_child_run_id": best["run_id"]}
        points = [Metric(clean(f"val/{metric}"), best["value"], now, len(ended))]
    client.log_batch(run_id, metrics=points, tags=[RunTag(name, runs.tag_value(text)) for name, text in tags.items()])
    parent["status"] = status = _status(jobs, sweep)
    if status == "RUNNING":
        client.update_run(run_id, status=status)
    else:
        client.set_terminated(run_id, status, now)


def _status(jobs: Mapping[str, Mapping[str, Any]], sweep: Sweep) -> str:
    """Return the status of the parent run. It is RUNNING until all jobs have ended, or the controller says so."""
    now = description.read_sweep(sweep.folder)
    how, statuses = None if now is None else now.ended, {job["status"] for job in jobs.values()}
    begun = max(len(jobs), len([*sweep.folder.glob("*/result.json")]))  # also jobs without this tracker
    if "running" in statuses or (how is None and begun < (sweep.jobs or math.inf)):
        return "RUNNING"
    if how == "interrupted" or "interrupted" in statuses:
        return "KILLED"
    return "FAILED" if how == "failed" or statuses & {"failed", "killed"} else "FINISHED"


def _table(jobs: Mapping[str, Mapping[str, Any]], ranked: list[str], metric: str | None) -> str:
    """Return a Markdown table of the jobs."""
    keys = dict.fromkeys(key for number in ranked for key in jobs[number]["values"])
    short = description.short_keys(keys)
    header = ["job", *(short[key] for key in keys), *([f"val/{metric}"] if metric else []), "status", "time"]
    lines = [_line(header), "| --- " * len(header) + "|"]
    for number in ranked[:_MOST_ROWS]:
        job = jobs[number]
        value, seconds = job.get("value"), job.get("seconds")
        shown = ["" if value is None or job["metric"] != metric else f"{value:.5g}"] if metric else []
        took = "" if seconds is None else str(timedelta(seconds=round(seconds)))
        line = _line([number, *(job["values"].get(key, "") for key in keys), *shown, job["status"], took])
        if sum(map(len, lines)) + len(lines) + len(line) > _LONGEST_NOTE:
            break
        lines.append(line)
    rest = len(ranked) - (len(lines) - 2)
    return "\n".join(lines) + (f"\n\n… and {rest} more" if rest else "")


def _line(cells: Iterable[Any]) -> str:
    # MLflow's page has no space between two columns; Markdown keeps a non-breaking one.
    return "| " + " | ".join(str(cell).replace("|", "\\|") + "\u00a0" for cell in cells) + " |"


def _save_view(client: MlflowClient, parent: dict[str, Any], run: Run) -> None:
    """Store a view of the experiment's page with the monitored metric and the swept values, best runs first.

    MLflow's default columns show neither. Sweeps over the same keys share a view.
    """
    job = parent["jobs"][str(_sweep(run).job)]
    if job["metric"] is None:
        return
    short, metric = description.short_keys(job["values"]), f"val/{job['metric']}"
    name = f"{metric} by {', '.join(short.values())}" if short else metric
    key = re.sub(r"\W+", "-", name)[:100]
    page = f"/#/experiments/{parent['experiment_id']}/runs?workflowType=machine_learning&viewStateShareKey={key}"
    if parent.get("page") == page:
        return
    column = f"metrics.`{clean(metric)}`"
    columns = [column, *(f"params.`{clean(axis)}`" for axis in short if axis in run.attempt.params)]
    state = {"orderByKey": column, "orderByAsc": job["rule"] == "less", "selectedColumns": columns}
    now = round(time() * 1000)
    view = {"name": name, "createdAt": now, "updatedAt": now, "state": json.dumps(state)}
    client.set_experiment_tag(parent["experiment_id"], _VIEW + key, json.dumps(view))
    parent["page"] = page
