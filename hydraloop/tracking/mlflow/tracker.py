"""MLflowTracker: sends records to an MLflow server or an SQLite database. Imports mlflow when it opens the run."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydraloop.run.record_log import Record
from hydraloop.tracking.mlflow import address, runs
from hydraloop.tracking.mlflow.calls import calling, hidden, prepare
from hydraloop.tracking.mlflow.files import Files, best_of, result_of
from hydraloop.tracking.mlflow.models import log_data_sets, send_model
from hydraloop.tracking.mlflow.names import Names, clean
from hydraloop.tracking.mlflow.points import Points, milliseconds
from hydraloop.tracking.mlflow.sweep import ensure_parent, update_parent
from hydraloop.tracking.mlflow.system import SystemMetrics
from hydraloop.tracking.tracker import Attempt, Finish, GoneError, RefusedError, Run, Tracker, UnusableError

if TYPE_CHECKING:
    from mlflow import MlflowClient

log = logging.getLogger(__name__)

_OF_AN_ADDRESS = (
    "tracking_uri",
    "at",
    "experiment_id",
    "run_id",
    "described",
    "closed",
    "again_from",
    "stored",
    "tables",
    "model",
    "no_files",
)
"""Entries of the memory that are dropped when the address changes."""
STATUS = {
    "finished": "FINISHED",
    "stopped": "FINISHED",
    "failed": "FAILED",
    "interrupted": "KILLED",
    "killed": "KILLED",
}
"""MLflow's names for how a run ended."""


class MLflowTracker(Tracker):
    """Sends a run with MLflow's client. The fluent interface is not used: it has one current run for the process.

    Each point is stored once. MLflow's database drops a point that has the same name, value, time and step as an
    existing one, so a repeated call does no harm. Points cannot be deleted. If a resumed run repeats iterations,
    points that differ from existing ones only in their time are not sent; others are, with their later time, and
    become the latest values. MLflow shows a metric's latest value at the highest step. If an earlier attempt had
    reached a higher step, the run's last value is sent once more at that step when the run ends.

    `memory`: `tracking_uri`, unless it contains a password; `at`, the same without password; `experiment_id`;
    `run_id`; `described`: the last attempt that is described; `closed`: the last attempt whose end is known there;
    `again_from`: the iteration from which points may exist already; `last`: milliseconds of the last record; `names`:
    metrics that are sent under another name; and the entries of `Points`, `Files` and `SystemMetrics`.
    """

    def __init__(self, options: dict[str, Any], run: Run, memory: dict[str, Any]) -> None:
        super().__init__(runs.without_secrets(options), run, memory)
        self._folder = Path(options.get("folder") or Path.cwd())
        self._calls = partial(calling, self._is_gone, self._gone)
        self._names = Names(memory.setdefault("names", {}))
        self._uri = ""
        self._database: int | None = None
        """Inode of the local database that is open."""
        self._client: MlflowClient | None = None
        self._points: Points | None = None
        self._files: Files | None = None
        self._system: SystemMetrics | None = None

    @classmethod
    def preload(cls) -> None:
        with hidden("pandas", "numpy"):  # only for data frames; a fifth of the CPU time of the import
            prepare()

    # Called by the follower. ---------------------------------------------------------------------------------------

    def open(self) -> None:
        """Create the run or find it again, and describe its attempts.

        Raises:
            UnusableError: the address, the database or the experiment cannot be used, or the run was deleted.
        """
        prepare()
        self._uri = address.address_of(self.options, self.memory)
        self._go_where_it_is()
        try:
            with self._calls():
                if self._client is None:
                    self._client = address.connected(self._uri)
                    self._database = self._inode()
                self._find_run(self._client)
                new = self.run.attempts[self.memory.get("described", -1) + 1 :]
                for attempt in new:
                    self._describe(self._client, attempt)
                    log_data_sets(self._client, self._run_id, attempt)
        except RefusedError as error:
            raise UnusableError(f"{error}; see hooks.mlflow.tracking_uri and hooks.mlflow.experiment") from error
        self._points = Points(self._client, self._run_id, self._names, self.memory)
        self._files = Files(self._client, self._run_id, self.run, self._calls, self.options, self.memory)
        for attempt in new:
            self._files.add_attempt(attempt.number)
        self.memory["described"] = self.run.attempt.number
        if self.options.get("system_metrics", True) and not self.options.get("_sync") and self._system is None:
            self._system = SystemMetrics(self.options.get("system_metrics_interval", 10.0), self.memory)

    def send(self, records: Sequence[Record]) -> None:
        """Send the records' numbers, and schedule their objects for `send_file`."""
        renamed = self._names.new(name for record in records for name in record.metrics)
        if renamed:
            pairs = ", ".join(f"{name!r} as {self._names.of(name)!r}" for name in renamed)
            log.warning("MLflow does not accept these names, so other names are sent: %s", pairs)
        _, points, files = self._opened
        with self._calls():
            self._check_database()
            points.send(records)
        files.add_objects(records)
        if records:
            self.memory["last"] = milliseconds(records[-1])

    def rewound(self, index: int, iteration: int, cut: Sequence[Record]) -> int:
        """Remember from which iteration points may exist already, and forget objects of records that were cut."""
        self.memory["again_from"] = min(iteration, self.memory.get("again_from", iteration))
        self.memory["due"] = [one for one in self.memory.get("due", []) if one.get("index", -1) < index]
        self.memory.pop("test", None)
        return index

    def send_file(self) -> bool:
        """Send system metrics, and the next file that is due."""
        client, _, files = self._opened
        self._send_load(client)
        if files.store(ended=self.memory.get("closed") == self.run.attempt.number):
            return True
        with self._calls():
            name = self.options.get("registered_model_name")
            return bool(self.options.get("log_model")) and send_model(client, self.run, name, self.memory)

    def finish(self, finish: Finish) -> None:
        """Send the final values and the status."""
        client, points, _ = self._opened
        self._send_load(client, ended=True)
        with self._calls():
            self._check_database()
            points.settle(self.run, self._log_best(client, best_of(self.run)))
            client.set_tag(self._run_id, "status", finish.status)
            if finish.error is not None:
                client.set_tag(self._run_id, "error", runs.tag_value(finish.error))
            client.set_terminated(self._run_id, STATUS[finish.status], self._ended())
            if self.run.sweep is not None:
                where = self.memory["experiment_id"], self._run_id
                update_parent(client, self._uri, self.run, *where, finish.status)
        self.memory["closed"] = self.run.attempt.number
        self.memory.pop("again_from", None)

    def close(self) -> None:
        """Release the client."""
        self._client = self._points = self._files = self._system = None

    @property
    def where(self) -> str | None:
        """The address of the run's page; for an SQLite database, after the command that starts the server."""
        if "run_id" not in self.memory or not self._uri:
            return None
        return address.page(self._uri, self._folder, self.memory["experiment_id"], self._run_id)

    # Opening. ------------------------------------------------------------------------------------------------------

    @property
    def _run_id(self) -> str:
        return str(self.memory["run_id"])

    @property
    def _opened(self) -> tuple[MlflowClient, Points, Files]:
        assert self._client is not None, "open comes first"
        assert self._points is not None, "open comes first"
        assert self._files is not None, "open comes first"
        return self._client, self._points, self._files

    def _go_where_it_is(self) -> None:
        """If the address has changed, start a new run there. The old one stays where it is."""
        old = self.memory.get("at", self.memory.get("tracking_uri"))
        if old is None or old == address.shown(self._uri):
            return
        log.warning("the run continues at %s; what was sent before is at %s", address.shown(self._uri), old)
        for name in _OF_AN_ADDRESS:
            self.memory.pop(name, None)

    def _find_run(self, client: MlflowClient) -> None:
        if "run_id" in self.memory:
            if self._is_gone():
                raise self._gone()
            return
        experiment = self.options.get("experiment") or self.run.experiment
        experiment_id = runs.experiment_of(client, experiment, self._uri)
        run_id = runs.find(client, experiment_id, self.run.uid)
        if run_id is None:
            tags = runs.tags_of(self.run, self.options)
            if self.run.sweep is not None:
                chosen = self.options.get("tags") or {}
                tags["mlflow.parentRunId"] = ensure_parent(client, self._uri, self.run, experiment_id, chosen)
            name = self.options.get("run_name") or self.run.name
            run_id = runs.create(client, experiment_id, name, tags, self.run.attempts[0].began)
        self.memory.update(experiment_id=experiment_id, run_id=run_id, at=address.shown(self._uri))
        if not address.has_password(self._uri):
            self.memory["tracking_uri"] = self._uri

    def _describe(self, client: MlflowClient, attempt: Attempt) -> None:
        number = attempt.number
        if number == 0:
            runs.log_params(client, self._run_id, runs.params_of(attempt.params))
            return
        changed = runs.changed_params(attempt.params, self.run.attempts[number - 1].params)
        runs.log_params(client, self._run_id, changed, prefix=f"resume_{number}/")
        for key, value in attempt.tags.items():
            if value != self.run.attempts[number - 1].tags.get(key):
                client.set_tag(self._run_id, clean(f"resume_{number}/{key}"), runs.tag_value(value))
        runs.drop_tags(client, self._run_id, ("status", "error"))  # those of the previous attempt
        client.update_run(self._run_id, status="RUNNING")
        if self.memory.get("closed", -1) < number - 1:  # that attempt's process was killed: its last points are unknown
            self.memory["again_from"] = min(attempt.iteration, self.memory.get("again_from", attempt.iteration))

    def _is_gone(self) -> bool:
        """Return whether the run was deleted, or the database does not have it any more."""
        return self._stage() != "active"

    def _stage(self) -> str | None:
        """Return `active` or `deleted`; None if the database does not have the run."""
        from mlflow.exceptions import MlflowException

        if self._client is None or "run_id" not in self.memory:
            return "active"
        if self._inode() != self._database:
            return None
        try:
            return str(self._client.get_run(self._run_id).info.lifecycle_stage)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise

    def _gone(self) -> UnusableError:
        """Return the error for a run that is gone: a deleted one can be restored."""
        if self._stage() != "deleted":
            return GoneError(f"{address.shown(self._uri)} does not have run {self._run_id} any more")
        command = address.restoring(self._uri, f"runs restore --run-id {self._run_id}")
        return UnusableError(f"run {self._run_id} was deleted there; restore it with `{command}`")

    def _inode(self) -> int | None:
        path = address.sqlite_path(self._uri)
        with suppress(OSError):
            return None if path is None else path.stat().st_ino
        return None

    def _check_database(self) -> None:
        """Check that the local database is the file that was opened: SQLite would write to a deleted file."""
        if self._inode() != self._database:
            raise self._gone()

    # Sending. ------------------------------------------------------------------------------------------------------

    def _send_load(self, client: MlflowClient, *, ended: bool = False) -> None:
        if self._system is not None and (metrics := self._system.read(ended=ended)):
            with self._calls():
                client.log_batch(self._run_id, metrics=metrics)
            self._system.sent()

    def _log_best(self, client: MlflowClient, best: dict[str, Any]) -> dict[str, float]:
        """Log the best value as a metric such as `best/accuracy`, a column to sort runs by. Returns it."""
        value = best.get("value")
        if not isinstance(value, int | float):
            return {}
        key = clean(f"best/{best['metric']}")
        client.log_metric(self._run_id, key, float(value), timestamp=self._ended(), step=best["iteration"])
        return {key: float(value)}

    def _ended(self) -> int:
        """Return when the attempt ended, in milliseconds; the same in a repeated call, if there is a result."""
        path = result_of(self.run)
        with suppress(OSError):
            if path is not None:
                return round(path.stat().st_mtime * 1000)
        return max(int(self.memory.get("last", time.time() * 1000)), round(self.run.attempt.began * 1000))
