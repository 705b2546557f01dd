"""The metrics of a run at MLflow: the numbers of its records, and the load of the machine."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hydraloop.run.record_log import FILENAME, Record, read_all
from hydraloop.tracking import description
from hydraloop.tracking.mlflow.runs import clean
from hydraloop.tracking.tracker import Run

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

log = logging.getLogger(__name__)

_AT_ONCE = 1000
"""Most points that a server accepts in one call."""
_SAMPLE = 1.0
"""Seconds between two samples of the load, which take about a millisecond, and to the first mean: a run that is shorter
than the interval has one, too."""


class Points:
    """The points of one run at MLflow, where nothing can be deleted.

    MLflow drops a point that has the same name, value, time and step as an existing one, so a repeated call does no
    harm. If a resumed run repeats iterations, equal values are not sent again. Others are, with their later time, and
    become the latest.

    Args:
        run: the run. Its log and its result are read when it ends.
        memory: the tracker's memory. `again_from`: the iteration from which points may exist already.
    """

    def __init__(self, client: MlflowClient, run_id: str, run: Run, memory: Mapping[str, Any]) -> None:
        self._client, self._run_id, self._run, self._memory = client, run_id, run, memory
        self._there: dict[str, dict[int, float | str]] = {}
        """By metric and step, the newest value at MLflow of points that may be repeated."""
        self._names: set[str] = set()

    def send(self, records: Sequence[Record]) -> None:
        """Send the points whose value differs from the newest one of their step."""
        names = {name for record in records for name in record.metrics} - self._names
        self._names |= names
        changed = ", ".join(f"{name!r} as {clean(name)!r}" for name in sorted(names) if clean(name) != name)
        if changed:
            log.warning("MLflow does not accept these names, so other names are sent: %s", changed)
        try:
            self._log(list(self._new(records)))
        except Exception:
            self._there.clear()  # it is unknown which points have arrived
            raise

    def _new(self, records: Sequence[Record]) -> Iterator[Metric]:
        from mlflow.entities import Metric

        again = self._memory.get("again_from")
        for record in records:
            time_ms, step = milliseconds(record), record.iteration
            for name, value in record.metrics.items():
                key = clean(name)
                if again is not None and step >= again:
                    there, kept = self._before(key), _as_kept(value)
                    if there.get(step) == kept:
                        continue
                    there[step] = kept
                yield Metric(key, value, time_ms, step)

    def _before(self, key: str) -> dict[int, float | str]:
        if key not in self._there:
            points = sorted(self._client.get_metric_history(self._run_id, key), key=lambda point: point.timestamp)
            again = self._memory["again_from"]
            self._there[key] = {one.step: _as_kept(one.value) for one in points if one.step >= again}
        return self._there[key]

    def finish(self, ended: int) -> None:
        """Send the best value as a metric such as `best/accuracy`, and make the run's last values the latest at MLflow.

        MLflow shows the value of the highest step. If an earlier attempt, or a test after more iterations, had reached
        a higher step, the last value is sent once more, at that step.

        Args:
            ended: when the run ended, in milliseconds.
        """
        from mlflow.entities import Metric

        result = description.result_of(self._run.run_dir, self._run.attempt)
        last = {f"test/{name}": float(value) for name, value in (result.get("test_metrics") or {}).items()}
        if "again_from" in self._memory:
            for record in read_all(self._run.run_dir / FILENAME):
                last |= record.metrics
        best = result.get("best") or {}
        if "metric" in best:
            name, value = f"best/{best['metric']}", float(best["value"])
            self._log([Metric(clean(name), value, ended, best["iteration"])])
            last[name] = value
        shown = self._client.get_run(self._run_id).data.metrics if last else {}
        late = []
        for key, value in ((clean(name), value) for name, value in last.items()):
            if key in shown and _as_kept(shown[key]) != _as_kept(value):
                points = self._client.get_metric_history(self._run_id, key)
                step = max(point.step for point in points)
                late.append(Metric(key, value, 1 + max(point.timestamp for point in points), step))
        self._log(late)

    def _log(self, metrics: Sequence[Metric]) -> None:
        """Log points in batches that a server accepts. Points that exist already are not duplicated."""
        for start in range(0, len(metrics), _AT_ONCE):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _AT_ONCE])


def milliseconds(record: Record) -> int:
    """Return a record's timestamp in milliseconds, MLflow's unit."""
    return max(0, round(record.timestamp * 1000))


def _as_kept(value: float) -> float | str:
    """Return a value as a database returns it, without infinity, and in a form that compares equal to itself."""
    if math.isnan(value):
        return "nan"
    return max(min(value, sys.float_info.max), -sys.float_info.max)


class Load:
    """The load of the machine (CPU, memory, disk, network, GPUs), read by MLflow's collectors.

    MLflow's own monitor is not used, because it stops after one failed request.

    Args:
        interval: seconds between two points, `system/cpu_utilization_percentage` and so on. Each is a mean.
        memory: the tracker's memory. `system_step` counts the points of all attempts.
    """

    def __init__(self, interval: float, memory: dict[str, Any]) -> None:
        from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
        from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
        from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
        from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

        self._interval, self._memory = interval, memory
        self._next_sample, self._due = 0.0, time.monotonic() + min(interval, _SAMPLE)
        self._collectors: list[Any] = []
        for make in (CPUMonitor, DiskMonitor, NetworkMonitor, GPUMonitor):
            with suppress(Exception):  # GPUMonitor: there is none, or nvidia-ml-py is not installed
                self._collectors.append(make())
        self._collect()
        self._clear()  # the first CPU reading is always 0: it is a mean since the previous reading

    def send(self, client: MlflowClient, run_id: str, *, ended: bool = False) -> None:
        """Take a sample, once a second at most, and send a point of each metric if the interval has passed.

        Args:
            ended: whether the run has ended, so that the interval is not waited for.
        """
        from mlflow.entities import Metric

        now = time.monotonic()
        if ended or now >= min(self._due, self._next_sample):
            self._next_sample = now + _SAMPLE
            self._collect()
        if ended or now >= self._due:
            step, now_ms = self._memory.get("system_step", 0), round(time.time() * 1000)
            means = [mean for one in self._collectors for mean in one.aggregate_metrics().items()]
            client.log_batch(run_id, [Metric(f"system/{name}", float(mean), now_ms, step) for name, mean in means])
            self._clear()
            self._memory["system_step"], self._due = step + 1, now + self._interval

    def _collect(self) -> None:
        for collector in list(self._collectors):
            try:
                collector.collect_metrics()
            except Exception as error:  # a container without network counters, a GPU that was reset
                log.info("no more readings of %s: %s", type(collector).__name__, error)
                self._collectors.remove(collector)

    def _clear(self) -> None:
        for collector in self._collectors:
            collector.clear_metrics()
