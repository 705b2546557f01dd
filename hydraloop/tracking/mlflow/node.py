"""`python -m hydraloop.tracking.mlflow.node`: log the load of a machine without rank 0 to rank 0's run at MLflow.

`nodes.py` starts this separate process on each of these machines and sends the options to its stdin. The process ends
when its stdin or its parent does. Errors are retried after an interval and never end training.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from time import monotonic
from typing import TYPE_CHECKING, Any

from hydraloop.safety.secrets import mask_text, remember
from hydraloop.tracking.follower.follower import described
from hydraloop.tracking.follower.masked_logging import log_to_stderr
from hydraloop.tracking.follower.process import Inbox
from hydraloop.tracking.follower.spawning import LEFT, MARGIN
from hydraloop.tracking.mlflow import address
from hydraloop.tracking.mlflow.calls import Calls
from hydraloop.tracking.mlflow.runs import find_running, log_points
from hydraloop.tracking.mlflow.system import SystemMetrics

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

log = logging.getLogger(__name__)

_SAMPLE = 1.0
"""Seconds between two readings. A point is the mean of an interval's readings."""
_UNTIL_THERE = 60.0
"""Seconds that rank 0 has to create the run before its absence is an error."""


class Node:
    """The system metrics of one machine.

    Args:
        options: the hook's `tracking_uri`, `folder` and `system_metrics_interval`.
        experiment: name of the run's experiment.
        run_dir: directory of the run, by which the run is found.
        node: number of the machine, for names such as `system/node_1/cpu_utilization_percentage`.
    """

    def __init__(self, options: dict[str, Any], experiment: str, run_dir: str, node: int) -> None:
        self._options, self._experiment, self._run_dir = options, experiment, run_dir
        self._prefix = f"system/node_{node}"
        self._interval = float(options["system_metrics_interval"])
        self._calls = Calls(lambda: False)
        self._began, self._next_try = monotonic(), 0.0
        self._client: MlflowClient | None = None
        self._run_id = ""
        self._system: SystemMetrics | None = None
        self.trouble: str | None = None
        """Why the last try failed; None if it did not fail."""

    def follow(self, ended: threading.Event) -> None:
        """Send points until `ended` is set."""
        while not ended.wait(_SAMPLE):
            try:
                self._step()
            except Exception as error:
                self._next_try = monotonic() + self._interval
                trouble = mask_text(described(error))
                if trouble != self.trouble:
                    log.warning("%s; tried again every %g s", trouble, self._interval)
                self.trouble = trouble

    def _step(self) -> None:
        metrics = None if self._system is None else self._system.read()
        if metrics == [] or monotonic() < self._next_try:
            return
        with self._calls():
            if self._system is None or metrics is None:
                self._find()
            else:
                self._send(self._system, metrics)
        self.trouble = None

    def _find(self) -> None:
        """Find the run, and the last point that an earlier attempt has sent.

        Raises:
            LookupError: the run does not exist after 60 s.
        """
        uri = address.address_of(self._options, {})
        path = address.sqlite_path(uri)
        there = path is None or path.exists()  # only rank 0 creates a database
        if there and self._client is None:
            self._client = address.connected(uri)
        run_id = None if self._client is None else find_running(self._client, self._experiment, self._run_dir)
        if self._client is None or run_id is None:
            self._next_try = monotonic() + self._interval
            if monotonic() - self._began < _UNTIL_THERE:
                return
            where = f"in experiment {self._experiment!r} at {address.shown(uri)}"
            raise LookupError(f"no running run {where} has the tag run_dir={self._run_dir}")
        points = self._client.get_metric_history(run_id, f"{self._prefix}/cpu_utilization_percentage")
        memory = {"system_step": 1 + max((point.step for point in points), default=-1)}
        self._run_id, self._system = run_id, SystemMetrics(self._interval, memory, prefix=self._prefix)
        log.info("points go to run %s", run_id)

    def _send(self, system: SystemMetrics, metrics: list[Metric]) -> None:
        assert self._client is not None, "it has found the run"
        log_points(self._client, self._run_id, metrics)
        system.sent()


def main() -> int:
    """Log this machine's load until the training process ends. Returns the exit code: `LEFT` if the last try failed."""
    log_to_stderr()
    os.dup2(2, 1)  # libraries may print to stdout
    inbox = Inbox()
    given = inbox.next()
    if given is None:
        return 0
    remember(given["options"])
    node = Node(given["options"], given["experiment"], given["run_dir"], given["node"])
    ended = threading.Event()
    thread = threading.Thread(target=node.follow, args=[ended], daemon=True)
    thread.start()
    while not inbox.ended:
        inbox.wait(3600.0)
    ended.set()
    thread.join(timeout=MARGIN)
    return 0 if node.trouble is None else LEFT


if __name__ == "__main__":
    sys.exit(main())
