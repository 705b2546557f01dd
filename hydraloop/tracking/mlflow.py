"""Calls of MLflow: sets it up for a sender, and translates its errors."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from hydraloop.files.metrics_log import FILENAME, Record
from hydraloop.files.result import FILENAME as RESULT_FILE
from hydraloop.files.secrets import masked
from hydraloop.tracking import mlflow_runs
from hydraloop.tracking.follower import causes, reason
from hydraloop.tracking.mlflow_runs import Files
from hydraloop.tracking.tracker import (
    Attempt,
    BusyError,
    Finish,
    GoneError,
    RefusedError,
    Run,
    Tracker,
    UnusableError,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient

DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",  # seconds; MLflow's 120 would hide a dead server
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # at once: a picture takes several requests. The sender retries the call
    "MLFLOW_DISABLE_TELEMETRY": "true",  # the process would wait for it when it exits
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
"""Environment variables of MLflow, unless the user has set them."""
_LONGEST_TEXT = 250
"""Most characters of a message: a proxy answers with a page."""


@contextmanager
def hidden(*packages: str) -> Iterator[None]:
    """Let `import` not find packages in the body. They must not be needed by what the body imports."""
    names = [name for name in packages if name not in sys.modules]
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]  # None: as if not installed
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def prepare() -> None:
    """Import MLflow and set it up for sending.

    Call it in a process that serves trackers only: it changes the environment, log levels and warning filters.
    """
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    os.environ["MLFLOW_ENABLE_ASYNC_LOGGING"] = "false"  # else, a call returns before its points are sent
    warnings.simplefilter("ignore")
    from mlflow import MlflowClient  # noqa: F401  # the import takes seconds, and is done before threads send

    for name in ("mlflow", "alembic"):  # they log tracebacks of errors that are raised anyway
        logging.getLogger(name).setLevel(logging.CRITICAL)


@contextmanager
def calling(gone: Callable[[], Exception | None] = lambda: None) -> Iterator[None]:
    """Translate the errors of the body's calls to those of a tracker.

    Args:
        gone: asks the server, after it has refused something. Returns the error if the run is gone, else None.
    """
    try:
        yield
    except Exception as error:
        found = translated(error)
        if found is error:
            raise
        lost = gone() if isinstance(found, GoneError | RefusedError) else None
        raise (lost or found) from error


def translated(error: Exception) -> Exception:
    """Translate an error of MLflow to one of a tracker, or to one after which the call is repeated.

    Errors are told apart by class, by MLflow's error code, and by the status of an answer.
    """
    import requests
    from mlflow.exceptions import MlflowException

    text, status = " ".join(str(error).split())[:_LONGEST_TEXT], None
    if isinstance(error, ImportError):
        return UnusableError(text)
    for cause in causes(error):
        if isinstance(cause, requests.HTTPError) and cause.response is not None:
            status = cause.response.status_code
        if isinstance(cause, requests.ConnectionError | requests.Timeout) and cause.request is not None:
            at = urlsplit(str(cause.request.url))
            place = f"{at.scheme}://{at.netloc.rpartition('@')[2]}"
            return ConnectionError(f"cannot reach {place}: {reason(error)}")
    if isinstance(error, MlflowException):
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return GoneError(f"the run does not exist there any more: {text}")
        if error.error_code == "RESOURCE_ALREADY_EXISTS":  # another job has just created the experiment
            return BusyError(text)
        status = status or error.get_http_status_code()  # type: ignore[no-untyped-call]
    if status in (401, 403):
        remedy = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
        return UnusableError(f"the server denies access: {remedy}; {text}")
    if status == 404:
        return ConnectionError(f"the answer is not from an MLflow server; see hooks.mlflow.tracking_uri ({text})")
    if status in (400, 413) or type(error) is ValueError:  # 413: too large; ValueError: of the client's own checks
        return RefusedError(text)
    if status is not None:
        return BusyError(reason(error))
    return error


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
    _points: mlflow_runs.Points
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
                self._uri = mlflow_runs.address_of(self.options, self.memory.get("tracking_uri"))
                self._client = mlflow_runs.connected(self._uri)
            with self._calls():
                self._find_run()
                for attempt in new:
                    self._describe(attempt)
        except RefusedError as error:
            raise UnusableError(f"{error}; see hooks.mlflow.tracking_uri and experiment_name") from error
        self._points = mlflow_runs.Points(self._client, self._run_id, self.memory)
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
        """Send the best value and the status."""
        if self._monitor is not None:
            self._monitor.finish()
            self._monitor = None
        client, ended = self._client, self._ended()
        with self._calls():
            self._check_database()
            mlflow_runs.send_best(client, self._run_id, self.run, ended)
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
        return mlflow_runs.page(self._uri, path)

    # Opening. ------------------------------------------------------------------------------------------------------

    @property
    def _run_id(self) -> str:
        return str(self.memory["run_id"])

    def _find_run(self) -> None:
        if "run_id" in self.memory:
            if (gone := self._gone()) is not None:
                raise gone
            return
        client, experiment = self._client, self.options.get("experiment") or self.run.experiment
        experiment_id = mlflow_runs.experiment_of(client, experiment, self._uri)
        tags, began = mlflow_runs.tags_of(self.run, self.options), self.run.attempts[0].began
        if self.run.sweep is not None:
            chosen = self.options.get("tags") or {}
            tags["mlflow.parentRunId"] = mlflow_runs.ensure_parent(client, self.run.sweep, experiment_id, chosen)
        name = str(tags.pop("mlflow.runName", self.run.name))
        run_id = mlflow_runs.ensure(client, experiment_id, self.run.uid, name, tags, began)
        self.memory.update(experiment_id=experiment_id, run_id=run_id, tracking_uri=mlflow_runs.shown(self._uri))

    def _describe(self, attempt: Attempt) -> None:
        client, number, params = self._client, attempt.number, mlflow_runs.params_of(attempt.params)
        if number == 0:
            mlflow_runs.log_params(client, self._run_id, params)
            return
        before = self.run.attempts[number - 1]
        old = mlflow_runs.params_of(before.params)
        changed = (dict.fromkeys(old, "null") | params).items() - old.items()
        mlflow_runs.log_params(client, self._run_id, {f"resume_{number}/{key}": value for key, value in changed})
        for key, value in attempt.tags.items():
            if value != before.tags.get(key):
                client.set_tag(self._run_id, mlflow_runs.clean(f"resume_{number}/{key}"), value)
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
        return GoneError(f"{mlflow_runs.shown(self._uri)} does not have run {self._run_id} any more")

    def _check_database(self) -> None:
        """Check that the local database exists: SQLite would write to a deleted file."""
        path = mlflow_runs.sqlite_path(self._uri)
        if path is not None and not path.exists():
            raise self._lost()

    def _ended(self) -> int:
        """Return when the attempt ended, in milliseconds: when it wrote its result, or else its last record."""
        paths = [self.run.run_dir / name for name in (RESULT_FILE, FILENAME)]
        times = [path.stat().st_mtime for path in paths if path.exists()]
        return round(1000 * max([self.run.attempt.began, *times]))
