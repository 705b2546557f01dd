"""System metrics of the machine (CPU, memory, disk, network, GPUs) by MLflow's own collectors.

Not by its monitor: that one ends for good when the server does not answer once.
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
"""Numbers kept while they cannot be sent: the newest ones, an hour or so."""

_FIRST = 1.0
"""Seconds to the first point: a run shorter than the interval has one, too."""


class SystemMetrics:
    """Samples once a call, and gives their means once an interval, as `system/cpu_utilization_percentage` and so on.

    Args:
        interval: seconds.
        memory: `system_step` in it counts the intervals, over all attempts.
        prefix: of the names.
    """

    def __init__(self, interval: float, memory: dict[str, Any], *, prefix: str = "system") -> None:
        self._interval, self._memory, self._prefix = interval, memory, prefix
        # A number that a GPU does not have would be said at each sample; its others are there.
        logging.getLogger("mlflow.system_metrics").setLevel(logging.ERROR)
        self._collectors = list(_collectors())
        self._due = time.monotonic() + min(interval, _FIRST)
        self._waiting: list[Metric] = []
        self._collect()
        for collector in self._collectors:
            collector.clear_metrics()  # the first reading of the CPU is 0: it is a mean since the one before

    def read(self, *, ended: bool = False) -> list[Metric]:
        """Sample; what is to be sent now, until `sent` says that it was.

        Args:
            ended: whether the run has: there is no more to wait for.
        """
        self._collect()
        if ended or time.monotonic() >= self._due:
            self._due = time.monotonic() + self._interval
            self._aggregate()
        return self._waiting

    def sent(self) -> None:
        """What `read` gave has arrived."""
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
                self._waiting.append(Metric(f"{self._prefix}/{name}", float(value), now, step))
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
