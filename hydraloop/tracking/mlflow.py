"""MLflowTracker: a run's records at an MLflow server, or in an SQLite database. Needs mlflow, imported as it opens."""

from __future__ import annotations

import gc
import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydraloop.engine.result import FILENAME as RESULT_FILE
from hydraloop.tracking import mlflow_address as address
from hydraloop.tracking import mlflow_runs as runs
from hydraloop.tracking.mlflow_calls import Calls
from hydraloop.tracking.mlflow_files import Files, checkpoints
from hydraloop.tracking.mlflow_names import Names, clean
from hydraloop.tracking.mlflow_sweep import ensure_parent
from hydraloop.tracking.mlflow_system import SystemMetrics
from hydraloop.tracking.tracker import Attempt, Finish, Record, RefusedError, Run, Tracker, UnusableError

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

log = logging.getLogger(__name__)

_THRESHOLDS = gc.get_threshold()
_STATUS = {
    "finished": "FINISHED",
    "stopped": "FINISHED",
    "failed": "FAILED",
    "interrupted": "KILLED",
    "killed": "KILLED",
}


class MLflowTracker(Tracker):
    """Sends a run by MLflow's client, never by its fluent interface, which keeps a current run a process.

    Each metric is there once: MLflow's database drops a point that is equal in name, value, time and step to one it
    has, and a repetition has the same time. Nothing can be deleted there; where a resumed run does iterations again,
    points that are equal but for the time are not sent, so that a bit-exact run has one point a step, and others are
    sent with their own, later time: those are the latest values then.

    `memory`: `tracking_uri`, `experiment_id`, `run_id`; `described`: the last attempt that is; `closed`: the last one
    whose end is known there; `again_from`: the iteration from which points may be there already; `last`: milliseconds
    of the last record; `names`: metrics sent under another name; and what `Files` and `SystemMetrics` keep.
    """

    kind = "mlflow"

    def __init__(self, options: dict[str, Any], run: Run, memory: dict[str, Any]) -> None:
        super().__init__(options, run, memory)
        self._folder = Path(options.get("folder") or Path.cwd())
        self._calls = Calls(self._is_gone)
        self._names = Names(memory.setdefault("names", {}))
        self._uri = ""
        self._client: MlflowClient | None = None
        self._files: Files | None = None
        self._system: SystemMetrics | None = None
        self._there: dict[str, dict[int, set[float | str]]] = {}
        """Values by metric and step that may come again."""

    # What a follower calls. ----------------------------------------------------------------------------------------

    def open(self) -> None:
        """Make the run, or find it again, and describe attempts.

        Raises:
            UnusableError: the address, the database or the experiment is none, or the run was deleted.
        """
        self._uri = address.address_of(self.options, self.memory)
        self._go_where_it_is()
        self._warn_of_old_runs()
        try:
            with self._calls():
                if self._client is None:
                    self._client = address.connected(self._uri)
                    _collect_less()
                self._find_run(self._client)
                new = self.run.attempts[self.memory.get("described", -1) + 1 :]
                for attempt in new:
                    self._describe(self._client, attempt)
        except RefusedError as error:
            raise UnusableError(f"{error}; see hooks.mlflow.tracking_uri and hooks.mlflow.experiment") from error
        self._files = Files(self._client, self._run_id, self.run, self._calls, self.memory)
        for attempt in new:
            self._files.add_config(attempt.number)
        self.memory["described"] = self.run.attempt.number
        if self.options.get("system_metrics", True) and not self.options.get("_sync") and self._system is None:
            self._system = SystemMetrics(self.options.get("system_metrics_interval", 10.0), self.memory)

    def send(self, records: Sequence[Record]) -> None:
        """Send their numbers; pictures follow when there is time."""
        renamed = self._names.new(name for record in records for name in record.metrics)
        if renamed:
            pairs = ", ".join(f"{name!r} as {self._names.of(name)!r}" for name in renamed)
            log.warning("MLflow does not take these names, so they are sent as others: %s", pairs)
        client, files = self._opened
        with self._calls():
            metrics = list(self._metrics(client, records))
            runs.log_points(client, self._run_id, metrics)
        if self.options.get("pictures", True):
            files.add_pictures(records)
        if records:
            self.memory["last"] = _milliseconds(records[-1])

    def rewound(self, index: int, iteration: int, cut: Sequence[Record]) -> int:
        """Remember from where points may be there already; pictures that were to be stored are no more."""
        self.memory["again_from"] = min(iteration, self.memory.get("again_from", iteration))
        times = {_milliseconds(record) for record in cut}
        self.memory["due"] = [one for one in self.memory.get("due", []) if one.get("timestamp") not in times]
        self.memory["last_picture"] = min(index - 1, self.memory.get("last_picture", -1))
        return index

    def idle(self) -> None:
        """Send the machine's numbers where they are due, and files that wait."""
        client, files = self._opened
        if self._system is not None and (metrics := self._system.read()):
            with self._calls():
                client.log_batch(self._run_id, metrics=metrics)
            self._system.sent()
        files.store()
        files.store_checkpoints(checkpoints(self.run, self.options.get("checkpoints"), None, ended=False))

    def finish(self, finish: Finish) -> None:
        """Store the files that are left, and close the run."""
        client, files = self._opened
        result = _result(self.run.run_dir)
        best: dict[str, Any] = (result or {}).get("best") or {}
        files.store_all()
        files.store_result()
        with self._calls():
            self._log_best(client, best)
            client.set_tag(self._run_id, "status", finish.status)
            if finish.error is not None:
                client.set_tag(self._run_id, "error", runs.tag_value(finish.error))
            elif self.run.attempt.number > 0:
                with suppress(Exception):  # there is none: no attempt has failed
                    client.delete_tag(self._run_id, "error")
            client.set_terminated(self._run_id, _STATUS[finish.status], self._ended())
        chosen = checkpoints(self.run, self.options.get("checkpoints"), best.get("checkpoint"), ended=True)
        files.store_checkpoints(chosen)
        self.memory["closed"] = self.run.attempt.number
        self.memory.pop("again_from", None)

    def close(self) -> None:
        """Let go of the client."""
        self._client = self._files = self._system = None
        gc.unfreeze()
        gc.set_threshold(*_THRESHOLDS)

    @property
    def where(self) -> str | None:
        """The run's page of a server; the command that shows an SQLite database."""
        if "run_id" not in self.memory or not self._uri:
            return None
        if self._uri.startswith("sqlite:"):
            return address.command(self._uri, self._folder)
        if not self._uri.startswith(("http:", "https:")):
            return None
        page = f"/#/experiments/{self.memory['experiment_id']}/runs/{self._run_id}"
        return address.shown(self._uri).rstrip("/") + page

    # Opening. ------------------------------------------------------------------------------------------------------

    @property
    def _run_id(self) -> str:
        return str(self.memory["run_id"])

    @property
    def _opened(self) -> tuple[MlflowClient, Files]:
        assert self._client is not None, "open comes first"
        assert self._files is not None, "open comes first"
        return self._client, self._files

    def _go_where_it_is(self) -> None:
        """Begin anew at another address than before; what is at the old one stays there."""
        old = self.memory.get("tracking_uri")
        if old is None or old == self._uri or address.has_password(self._uri):
            return
        log.warning("the run goes on at %s; what was sent before is at %s", address.shown(self._uri), old)
        for name in (
            "tracking_uri",
            "experiment_id",
            "run_id",
            "described",
            "closed",
            "again_from",
            "stored",
            "no_files",
        ):
            self.memory.pop(name, None)

    def _warn_of_old_runs(self) -> None:
        """Once a run: a person who types `mlflow ui` would look for it in vain."""
        command = address.command(self._uri, self._folder)
        if address.is_default(self._uri, self._folder) and command != "mlflow ui" and not self.memory.get("warned"):
            self.memory["warned"] = True
            log.warning(
                "./mlruns has runs of an older MLflow, which hide mlflow.db from a plain mlflow ui: type %s", command
            )

    def _find_run(self, client: MlflowClient) -> None:
        if "run_id" in self.memory:
            if self._is_gone():
                raise UnusableError(
                    f"run {self._run_id} was deleted there; mlflow runs restore --run-id {self._run_id} brings it back"
                )
            return
        experiment = self.options.get("experiment") or self.run.experiment
        experiment_id = runs.experiment_of(client, experiment, self._uri)
        run_id = runs.find(client, experiment_id, self.run.uid)
        if run_id is None:
            tags = runs.tags_of(self.run, self.options.get("tags") or {})
            if self.run.sweep is not None:
                parent = ensure_parent(self.options, self.run.sweep, experiment, client=client, uri=self._uri)
                tags["mlflow.parentRunId"] = parent
            name = self.options.get("run_name") or self.run.name
            run_id = runs.create(client, experiment_id, name, tags, self.run.attempts[0].began)
        self.memory.update(experiment_id=experiment_id, run_id=run_id)
        if not address.has_password(self._uri):
            self.memory["tracking_uri"] = self._uri

    def _describe(self, client: MlflowClient, attempt: Attempt) -> None:
        number = attempt.number
        if number == 0:
            runs.log_params(client, self._run_id, attempt.params)
            return
        before = self.run.attempts[number - 1].params
        changed = {key: value for key, value in attempt.params.items() if key not in before or before[key] != value}
        runs.log_params(client, self._run_id, changed, prefix=f"resume_{number}/")
        for key, value in attempt.tags.items():
            if value != self.run.attempts[number - 1].tags.get(key):
                client.set_tag(self._run_id, clean(f"resume_{number}/{key}"), runs.tag_value(value))
        client.update_run(self._run_id, status="RUNNING")
        if self.memory.get("closed", -1) < number - 1:  # what its process sent last is not known here
            self.memory["again_from"] = min(attempt.iteration, self.memory.get("again_from", attempt.iteration))

    def _is_gone(self) -> bool:
        """Whether the run was deleted."""
        from mlflow.exceptions import MlflowException

        if self._client is None or "run_id" not in self.memory:
            return False
        try:
            return bool(self._client.get_run(self._run_id).info.lifecycle_stage == "deleted")
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return True
            raise

    # Sending. ------------------------------------------------------------------------------------------------------

    def _metrics(self, client: MlflowClient, records: Sequence[Record]) -> Iterator[Metric]:
        from mlflow.entities import Metric

        again = self.memory.get("again_from")
        for record in records:
            time_ms, step = _milliseconds(record), record.iteration
            for name, value in record.metrics.items():
                key = self._names.of(name)
                if again is None or step < again or runs.as_kept(value) not in self._before(client, key).get(step, ()):
                    yield Metric(key, value, time_ms, step)

    def _before(self, client: MlflowClient, key: str) -> dict[int, set[float | str]]:
        """What is there of a metric, from the iteration on at which the run was resumed."""
        if key not in self._there:
            found: dict[int, set[float | str]] = {}
            for metric in client.get_metric_history(self._run_id, key):
                if metric.step >= self.memory["again_from"]:
                    found.setdefault(metric.step, set()).add(runs.as_kept(metric.value))
            self._there[key] = found
        return self._there[key]

    def _log_best(self, client: MlflowClient, best: dict[str, Any]) -> None:
        """As a metric, `best/accuracy` at its iteration: a column that runs are sorted by."""
        value = best.get("value")
        if isinstance(value, int | float):
            key = clean(f"best/{best['metric']}")
            client.log_metric(self._run_id, key, float(value), timestamp=self._ended(), step=best["iteration"])

    def _ended(self) -> int:
        """When the attempt ended, in milliseconds: the same at each repetition, where that is known."""
        path, began = self.run.run_dir / RESULT_FILE, self.run.attempt.began
        with suppress(OSError):
            if path.stat().st_mtime >= began:
                return round(path.stat().st_mtime * 1000)
        return max(int(self.memory.get("last", time.time() * 1000)), round(began * 1000))


def _collect_less() -> None:
    """Let Python look for garbage less often, and not among what libraries made when they were imported.

    A batch for a database is thousands of objects, all freed by counting: 20,000 metrics a second instead of 13,000.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def _milliseconds(record: Record) -> int:
    return max(0, round(record.timestamp * 1000))


def _result(run_dir: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((run_dir / RESULT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
