"""MLflowTracker: sends records to an MLflow server or an SQLite database. Imports mlflow when it opens the run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from hydraloop.files.record_log import FILENAME, Record
from hydraloop.files.result import FILENAME as RESULT_FILE
from hydraloop.files.secrets import masked
from hydraloop.tracking.mlflow import address, runs
from hydraloop.tracking.mlflow.calls import calling, hidden, prepare
from hydraloop.tracking.mlflow.files import Files
from hydraloop.tracking.tracker import Attempt, Finish, GoneError, LostError, RefusedError, Run, Tracker, UnusableError

if TYPE_CHECKING:
    from mlflow import MlflowClient

log = logging.getLogger(__name__)

_ADDRESS = ("tracking_uri", "environment", "folder")
"""Options that are needed as they are; secrets in the others are masked."""
STATUS = {"finished": "FINISHED", "stopped": "FINISHED", "failed": "FAILED"}
"""MLflow's names for how a run ended. The others are `KILLED`."""


class MLflowTracker(Tracker):
    """Sends a run with MLflow's client. The fluent interface is not used: it has one current run for the process.

    `memory`: `tracking_uri`, without a password; `experiment_id`; `run_id`; `described`: the last attempt that is
    described; and the entries of `Points` and `Files`.
    """

    _client: MlflowClient
    _points: runs.Points
    _files: Files

    def __init__(self, options: dict[str, Any], run: Run, memory: dict[str, Any]) -> None:
        needed = {name: options[name] for name in _ADDRESS if name in options}
        super().__init__({**masked(options), **needed}, run, memory)
        self._calls = partial(calling, self._gone)
        self._uri = ""
        self._monitor: Any = None
        self._warned = self._stores_nothing = False
        """Whether a file was refused, and whether no files can be stored."""

    @classmethod
    def preload(cls) -> None:
        with hidden("pandas", "numpy"):  # only for data frames; a fourth of the CPU time of the import
            prepare()

    # Called by the sender. ---------------------------------------------------------------------------------------

    def open(self) -> None:
        """Create the run or find it again, and describe its attempts.

        Raises:
            UnusableError: the address, the database or the experiment cannot be used, or the run was deleted.
        """
        prepare()
        new = self.run.attempts[self.memory.get("described", -1) + 1 :]
        try:
            with calling():  # there is no client yet that could ask for the run
                self._uri = address.address_of(self.options, self.memory.get("tracking_uri"))
                self._leave_other_address()
                self._client = address.connected(self._uri)
            with self._calls():
                self._find_run()
                for attempt in new:
                    self._describe(attempt)
        except RefusedError as error:
            raise UnusableError(f"{error}; see hooks.mlflow.tracking_uri and experiment_name") from error
        self._points = runs.Points(self._client, self._run_id, self.memory)
        self._files = Files(self._client, self._run_id, self.run, self.options, self.memory)
        for attempt in new:
            self._files.add_attempt(attempt.number)
        self.memory["described"] = self.run.attempt.number
        if self.options.get("system_metrics", True) and self.options.get("_measures", True):
            from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

            monitor: Any = SystemMetricsMonitor
            self._monitor = monitor(self._run_id, resume_logging=True, tracking_uri=self._uri)
            self._monitor.start()

    def send(self, records: Sequence[Record]) -> None:
        """Send the records' numbers, and schedule their objects for `send_file`."""
        with self._calls():
            self._check_database()
            self._points.send(records)
        self._files.add_objects(records)

    def rewound(self, index: int) -> int:
        """Forget objects of records that were cut."""
        self.memory["due"] = [one for one in self.memory.get("due", []) if one.get("index", -1) < index]
        return index

    def send_file(self) -> bool:
        """Send the next file that is due, or skip it if it is refused; only the first skipped file is a warning.

        If the server cannot store files at all, log one warning and send no further one: the next process tries again.
        """
        if not self._files.due or self._stores_nothing:
            return False
        try:
            with self._calls():
                self._files.store(self._files.due[0])
        except (RefusedError, FileNotFoundError) as error:
            log.log(logging.INFO if self._warned else logging.WARNING, "a file is not stored: %s", error)
            self._warned = True
        except GoneError:
            raise
        except (UnusableError, PermissionError, NotADirectoryError) as error:
            self._stores_nothing = True
            log.warning("files (config, pictures, result, checkpoints) are not stored, only metrics are: %s", error)
            return False
        self._files.due.pop(0)
        return True

    def finish(self, finish: Finish) -> None:
        """Send the final values and the status."""
        if self._monitor is not None:
            self._monitor.finish()
            self._monitor = None
        client, ended = self._client, self._ended()
        with self._calls():
            self._check_database()
            runs.send_final_values(client, self._run_id, self.run, ended)
            client.set_tag(self._run_id, "status", finish.status)
            if finish.error is not None:
                client.set_tag(self._run_id, "error", finish.error)
            client.set_terminated(self._run_id, STATUS.get(finish.status, "KILLED"), ended)
        self._files.add_end()
        self.memory.pop("again_from", None)

    @property
    def where(self) -> str | None:
        """The address of the run's page; for an SQLite database, after the command that starts the server."""
        if "run_id" not in self.memory or not self._uri:
            return None
        path = f"experiments/{self.memory['experiment_id']}/runs/{self._run_id}?workflowType=machine_learning"
        return address.page(self._uri, path)

    # Opening. ------------------------------------------------------------------------------------------------------

    @property
    def _run_id(self) -> str:
        return str(self.memory["run_id"])

    def _leave_other_address(self) -> None:
        """If the address has changed, send everything to the new one."""
        now = address.shown(self._uri)
        before = address.shown(self.memory.get("tracking_uri", now))
        if before != now:
            log.warning("everything is sent to %s; the run at %s stays there", now, before)
            self.memory.clear()
            raise LostError(0)

    def _find_run(self) -> None:
        if "run_id" in self.memory:
            if (gone := self._gone()) is not None:
                raise gone
            return
        client, experiment = self._client, self.options.get("experiment") or self.run.experiment
        experiment_id = runs.experiment_of(client, experiment, self._uri)
        tags, began = runs.tags_of(self.run, self.options), self.run.attempts[0].began
        if self.run.sweep is not None:
            chosen = self.options.get("tags") or {}
            tags["mlflow.parentRunId"] = runs.ensure_parent(client, self.run.sweep, experiment_id, chosen)
        name = str(tags.pop("mlflow.runName", self.run.name))
        run_id = runs.ensure(client, experiment_id, self.run.uid, name, tags, began)
        self.memory.update(experiment_id=experiment_id, run_id=run_id, tracking_uri=address.shown(self._uri))

    def _describe(self, attempt: Attempt) -> None:
        client, number, params = self._client, attempt.number, runs.params_of(attempt.params)
        if number == 0:
            runs.log_params(client, self._run_id, params)
            return
        before = self.run.attempts[number - 1]
        old = runs.params_of(before.params)
        changed = (dict.fromkeys(old, "null") | params).items() - old.items()
        runs.log_params(client, self._run_id, {f"resume_{number}/{key}": value for key, value in changed})
        for key, value in attempt.tags.items():
            if value != before.tags.get(key):
                client.set_tag(self._run_id, runs.clean(f"resume_{number}/{key}"), value)
        for key in {"status", "error"} & client.get_run(self._run_id).data.tags.keys():
            client.delete_tag(self._run_id, key)  # of the previous attempt
        client.update_run(self._run_id, status="RUNNING")
        self.memory["again_from"] = min(attempt.iteration, self.memory.get("again_from", attempt.iteration))

    def _gone(self) -> GoneError | None:
        """Return the error if the run was deleted, None if it is there."""
        from mlflow.exceptions import MlflowException

        if "run_id" not in self.memory:
            return None
        try:
            if self._client.get_run(self._run_id).info.lifecycle_stage == "active":
                return None
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
        return self._lost()

    def _lost(self) -> GoneError:
        return GoneError(f"{address.shown(self._uri)} does not have run {self._run_id} any more")

    def _check_database(self) -> None:
        """Check that the local database exists: SQLite would write to a deleted file."""
        path = address.sqlite_path(self._uri)
        if path is not None and not path.exists():
            raise self._lost()

    def _ended(self) -> int:
        """Return when the attempt ended, in milliseconds: when it wrote its result, or else its last record."""
        paths = [self.run.run_dir / name for name in (RESULT_FILE, FILENAME)]
        times = [path.stat().st_mtime for path in paths if path.exists()]
        return round(1000 * max([self.run.attempt.began, *times]))
