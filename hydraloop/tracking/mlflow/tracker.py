"""MLflowTracker: sends records to an MLflow server or an SQLite database. Imports mlflow when it opens the run."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydraloop.run.record_log import Record
from hydraloop.safety.secrets import masked
from hydraloop.tracking.mlflow import address, runs
from hydraloop.tracking.mlflow.calls import calling, hidden, prepare
from hydraloop.tracking.mlflow.files import Files, result_of
from hydraloop.tracking.mlflow.metrics import Load, Points, milliseconds
from hydraloop.tracking.mlflow.models import log_data_sets
from hydraloop.tracking.mlflow.sweep import ensure_parent, update_parent
from hydraloop.tracking.tracker import Attempt, Finish, GoneError, LostError, RefusedError, Run, Tracker, UnusableError

if TYPE_CHECKING:
    from mlflow import MlflowClient

log = logging.getLogger(__name__)

_ADDRESS = ("tracking_uri", "environment", "folder")
"""Options that are needed as they are; secrets in the others are masked."""
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

    `memory`: `tracking_uri`, without a password; `experiment_id`; `run_id`; `described`: the last attempt that is
    described; `closed`: the last attempt whose end is known there; `again_from`: the iteration from which points may
    exist already; `last`: milliseconds of the last record; and the entries of `Files`, `Load` and `send_model`.
    """

    def __init__(self, options: dict[str, Any], run: Run, memory: dict[str, Any]) -> None:
        needed = {name: options[name] for name in _ADDRESS if name in options}
        super().__init__({**masked(options), **needed}, run, memory)
        self._folder = Path(options.get("folder") or Path.cwd())
        self._calls = partial(calling, self._gone)
        self._uri = ""
        self._database: int | None = None
        """Inode of the local database that is open."""
        self._client: MlflowClient | None = None
        self._parts: tuple[MlflowClient, Points, Files] | None = None
        self._load: Load | None = None

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
        try:
            with self._calls():
                self._uri = address.address_of(self.options, self.memory)
                self._leave_other_address()
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
        points = Points(self._client, self._run_id, self.run, self.memory)
        storing = partial(calling, self._gone, a_file=True)
        files = Files(self._client, self._run_id, self.run, storing, self.options, self.memory)
        self._parts = self._client, points, files
        for attempt in new:
            files.add_attempt(attempt.number)
        self.memory["described"] = self.run.attempt.number
        if self.options.get("system_metrics", True) and not self.options.get("_sync") and self._load is None:
            self._load = Load(self.options.get("system_metrics_interval", 10.0), self.memory)

    def send(self, records: Sequence[Record]) -> None:
        """Send the records' numbers, and schedule their objects for `send_file`."""
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
        return index

    def send_file(self) -> bool:
        """Send system metrics, and the next file that is due."""
        client, _, files = self._opened
        self._send_load(client)
        return files.store(ended=self.memory.get("closed") == self.run.attempt.number)

    def finish(self, finish: Finish) -> None:
        """Send the final values and the status."""
        client, points, _ = self._opened
        self._send_load(client, ended=True)
        with self._calls():
            self._check_database()
            points.finish(self._ended())
            client.set_tag(self._run_id, "status", finish.status)
            if finish.error is not None:
                client.set_tag(self._run_id, "error", finish.error)
            client.set_terminated(self._run_id, STATUS[finish.status], self._ended())
            if self.run.sweep is not None:
                update_parent(client, self._uri, self.run, self.memory["experiment_id"], finish.status)
        self.memory["closed"] = self.run.attempt.number
        self.memory.pop("again_from", None)

    def close(self) -> None:
        """Release the client."""
        self._client = self._parts = self._load = None

    @property
    def where(self) -> str | None:
        """The address of the run's page; for an SQLite database, after the command that starts the server."""
        if "run_id" not in self.memory or not self._uri:
            return None
        path = f"experiments/{self.memory['experiment_id']}/runs/{self._run_id}?workflowType=machine_learning"
        return address.page(self._uri, self._folder, path)

    # Opening. ------------------------------------------------------------------------------------------------------

    @property
    def _run_id(self) -> str:
        return str(self.memory["run_id"])

    @property
    def _opened(self) -> tuple[MlflowClient, Points, Files]:
        assert self._parts is not None, "open comes first"
        return self._parts

    def _leave_other_address(self) -> None:
        """If the address has changed, send everything to the new one."""
        now = address.shown(self._uri)
        before = address.shown(self.memory.get("tracking_uri", now))
        if before != now:
            log.warning("everything is sent to %s; the run at %s stays there", now, before)
            self.memory.clear()
            raise LostError(0)

    def _find_run(self, client: MlflowClient) -> None:
        if "run_id" in self.memory:
            if (gone := self._gone()) is not None:
                raise gone
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
        self.memory.update(experiment_id=experiment_id, run_id=run_id, tracking_uri=address.shown(self._uri))

    def _describe(self, client: MlflowClient, attempt: Attempt) -> None:
        number = attempt.number
        if number == 0:
            runs.log_params(client, self._run_id, runs.params_of(attempt.params))
            return
        before = self.run.attempts[number - 1]
        params = runs.changed_params(attempt.params, before.params)
        runs.log_params(client, self._run_id, {f"resume_{number}/{key}": value for key, value in params.items()})
        for key, value in attempt.tags.items():
            if value != before.tags.get(key):
                client.set_tag(self._run_id, runs.clean(f"resume_{number}/{key}"), value)
        for key in {"status", "error"} & client.get_run(self._run_id).data.tags.keys():
            client.delete_tag(self._run_id, key)  # of the previous attempt
        client.update_run(self._run_id, status="RUNNING")
        if self.memory.get("closed", -1) < number - 1:  # that attempt's process was killed: its last points are unknown
            self.memory["again_from"] = min(attempt.iteration, self.memory.get("again_from", attempt.iteration))

    def _gone(self) -> GoneError | None:
        """Return the error if the run or its database was deleted, None if they are there."""
        from mlflow.exceptions import MlflowException

        if self._client is None or "run_id" not in self.memory:
            return None
        try:
            same = self._inode() == self._database
            if same and self._client.get_run(self._run_id).info.lifecycle_stage == "active":
                return None
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
        return GoneError(f"{address.shown(self._uri)} does not have run {self._run_id} any more")

    def _inode(self) -> int | None:
        path = address.sqlite_path(self._uri)
        return path.stat().st_ino if path is not None and path.exists() else None

    def _check_database(self) -> None:
        """Check that the local database is the file that was opened: SQLite would write to a deleted file."""
        if self._inode() != self._database and (gone := self._gone()) is not None:
            raise gone

    def _send_load(self, client: MlflowClient, *, ended: bool = False) -> None:
        if self._load is not None:
            with self._calls():
                self._load.send(client, self._run_id, ended=ended)

    def _ended(self) -> int:
        """Return when the attempt ended, in milliseconds; the same in a repeated call, if there is a result."""
        result = result_of(self.run)
        if result is not None:
            return round(result.stat().st_mtime * 1000)
        return max(int(self.memory.get("last", time.time() * 1000)), round(self.run.attempt.began * 1000))
