"""What MLflow shows of a sweep: a table of its jobs, best first, and a view of the experiment's page. Sends nothing."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from hydraloop.tracking import description
from hydraloop.tracking.mlflow.runs import clean, params_of
from hydraloop.tracking.tracker import Run

RUNNING = "running"
"""Status of a job that has not ended."""
_MOST_ROWS = 60
"""Most rows of the table: a description may have 8,000 characters."""

Job = Mapping[str, Any]
"""What is known of a job: `name`, `values` (swept, by key), `status`, `metric`, `rule`, `value` (null: none) and
`seconds`."""


def job_of(run: Run, status: str) -> Job:
    """Describe a job, with its best value of the monitored metric if it has ended."""
    typed, axes = description.override_values(run.run_dir), () if run.sweep is None else run.sweep.axes
    result = description.result_of(run.run_dir, run.attempt)
    monitor, best = result.get("monitor") or {}, result.get("best") or {}
    metric = monitor.get("metric")
    value = float(best.get("value", (result.get("val_metrics") or {}).get(metric, "nan")))
    return {
        "name": run.name,
        "values": {key: text for key, text in typed.items() if key in axes or not axes},
        "status": status,
        "metric": metric,
        "rule": monitor.get("rule"),
        "value": value if math.isfinite(value) else None,
        "seconds": result.get("seconds"),
    }


def best_first(jobs: Mapping[str, Job]) -> tuple[str | None, list[str]]:
    """Return the metric by which jobs are compared, None if there is none, and the numbers of the jobs in order.

    Jobs without a value of that metric come last.
    """
    first = next((job for job in jobs.values() if job["value"] is not None), {"metric": None, "rule": None})
    metric, sign = first["metric"], -1 if first["rule"] == "greater" else 1

    def rank(number: str) -> tuple[float, int]:
        value = jobs[number]["value"] if jobs[number]["metric"] == metric else None
        return math.inf if value is None else sign * value, int(number)

    return metric, sorted(jobs, key=rank)


def table(jobs: Mapping[str, Job], order: Sequence[str], metric: str | None) -> str:
    """Return a Markdown table of jobs."""
    keys = dict.fromkeys(key for number in order for key in jobs[number]["values"])
    short = description.short_keys(keys)
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


def view(job: Job, run: Run, now: int) -> tuple[str, str]:
    """Return the key and content of a view of the experiment's page, best runs first.

    It has the monitored metric and the swept values, which MLflow's default columns do not show. Sweeps over the same
    keys share a view.

    Args:
        job: describes `run`; it has a metric.
        now: time in milliseconds.
    """
    short, metric, params = description.short_keys(job["values"]), f"val/{job['metric']}", params_of(run.attempt.params)
    name = f"{metric} by {', '.join(short.values())}" if short else metric
    column = f"metrics.`{clean(metric)}`"
    columns = [column, *(f"params.`{clean(axis)}`" for axis in short if axis in params)]
    state = {"orderByKey": column, "orderByAsc": job["rule"] == "less", "selectedColumns": columns}
    content = {"name": name, "createdAt": now, "updatedAt": now, "state": json.dumps(state)}
    return re.sub(r"\W+", "-", name)[:100], json.dumps(content)
