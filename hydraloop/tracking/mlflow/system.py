"""System metrics of the machine (CPU, memory, disk, network, GPUs), read by MLflow's collectors.

MLflow's own monitor is not used, because it stops after one failed request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow.entities import Metric

log = logging.getLogger(__name__)

_MOST = 1000
"""Most values that are kept while they cannot be sent; about an hour's."""

_FIRST = 1.0
"""Seconds to the first point, so that a run shorter than the interval has one, too."""
_SAMPLE = 1.0
"""Least seconds between two samples, which take about a millisecond."""


class SystemMetrics:
    """Samples at calls of `read`, once a second at most; averages are `system/cpu_utilization_percentage` and so on.

    Args:
        interval: seconds between two averages.
        memory: `system_step` counts the intervals of all attempts.
    """

    def __init__(self, interval: float, memory: dict[str, Any]) -> None:
        self._interval, self._memory = interval, memory
        self._collectors = list(_collectors())
        self._due = time.monotonic() + min(interval, _FIRST)
        self._next_sample = 0.0
        self._waiting: list[Metric] = []
        self._collect()
        for collector in self._collectors:
            collector.clear_metrics()  # the first CPU reading is always 0: it is a mean since the previous reading

    def read(self, *, ended: bool = False) -> list[Metric]:
        """Take a sample. Returns the points to send now, until `sent` is called.

        Args:
            ended: whether the run has ended, so that the interval is not waited for.
        """
        now = time.monotonic()
        if ended or now >= min(self._due, self._next_sample):
            self._next_sample = now + _SAMPLE
            self._collect()
        if ended or now >= self._due:
            self._due = now + self._interval
            self._aggregate()
        return self._waiting

    def sent(self) -> None:
        """Confirm that the points that `read` returned have arrived."""
        self._waiting = []

    def _collect(self) -> None:
        for collector in list(self._collectors):
            try:
                collector.collect_metrics()
            except Exception as error:  # a container without network counters, a GPU that was reset
                log.info("no more readings of %s: %s", type(collector).__name__, error)
                self._collectors.remove(collector)

    def _aggregate(self) -> None:
        from mlflow.entities import Metric

        step, now = self._memory.get("system_step", 0), round(time.time() * 1000)
        for collector in self._collectors:
            for name, value in collector.aggregate_metrics().items():
                self._waiting.append(Metric(f"system/{name}", float(value), now, step))
            collector.clear_metrics()
        self._memory["system_step"] = step + 1
        self._waiting = self._waiting[-_MOST:]


def _collectors() -> Iterator[Any]:
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

    for make in (CPUMonitor, DiskMonitor, NetworkMonitor, GPUMonitor):
        with suppress(Exception):  # GPUMonitor: there is none, or nvidia-ml-py is not installed
            yield make()
