"""Points of metrics at MLflow, where nothing can be deleted: handles iterations that a resumed run repeats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hydraloop.run.record_log import FILENAME, Record, read_all
from hydraloop.tracking.mlflow import runs
from hydraloop.tracking.mlflow.names import Names
from hydraloop.tracking.tracker import Run

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric


class Points:
    """The points of one run.

    Args:
        names: maps names of metrics to those at MLflow.
        memory: the tracker's memory. `again_from`: the iteration from which points may exist already; `test`: the
            newest values of tests.
    """

    def __init__(self, client: MlflowClient, run_id: str, names: Names, memory: dict[str, Any]) -> None:
        self._client, self._run_id, self._names, self._memory = client, run_id, names, memory
        self._there: dict[str, dict[int, float | str]] = {}
        """By metric and step, the newest value at MLflow of points that may be repeated."""

    def send(self, records: Sequence[Record]) -> None:
        """Send the points whose value differs from the newest one of their step."""
        try:
            runs.log_points(self._client, self._run_id, list(self._new(records)))
        except Exception:
            self._there.clear()  # it is unknown which points have arrived
            raise
        for record in records:
            if record.mode == "test":
                self._memory.setdefault("test", {}).update(record.metrics)

    def _new(self, records: Sequence[Record]) -> Iterator[Metric]:
        from mlflow.entities import Metric

        again = self._memory.get("again_from")
        for record in records:
            time_ms, step = milliseconds(record), record.iteration
            for name, value in record.metrics.items():
                key = self._names.of(name)
                if again is not None and step >= again:
                    there, kept = self._before(key), runs.as_kept(value)
                    if there.get(step) == kept:
                        continue
                    there[step] = kept
                yield Metric(key, value, time_ms, step)

    def _before(self, key: str) -> dict[int, float | str]:
        if key not in self._there:
            points = sorted(self._client.get_metric_history(self._run_id, key), key=lambda point: point.timestamp)
            again = self._memory["again_from"]
            self._there[key] = {one.step: runs.as_kept(one.value) for one in points if one.step >= again}
        return self._there[key]

    def settle(self, run: Run, others: Mapping[str, float]) -> None:
        """Make the run's last values the latest ones at MLflow, which shows those of the highest step.

        If an earlier attempt, or a test after more iterations, had reached a higher step, the last value is sent once
        more, at that step.

        Args:
            run: the run whose log is read.
            others: values that are not in the log, by their name at MLflow.
        """
        from mlflow.entities import Metric

        last: dict[str, float] = dict(self._memory.get("test", {}))
        if "again_from" in self._memory:
            for record in read_all(run.run_dir / FILENAME):
                last |= record.metrics
        if not last:
            return
        wanted = {**{self._names.of(name): value for name, value in last.items()}, **others}
        shown = self._client.get_run(self._run_id).data.metrics
        late = []
        for key, value in wanted.items():
            if key in shown and runs.as_kept(shown[key]) != runs.as_kept(value):
                points = self._client.get_metric_history(self._run_id, key)
                step = max(point.step for point in points)
                late.append(Metric(key, value, 1 + max(point.timestamp for point in points), step))
        runs.log_points(self._client, self._run_id, late)


def milliseconds(record: Record) -> int:
    """Return a record's timestamp in milliseconds, MLflow's unit."""
    return max(0, round(record.timestamp * 1000))
