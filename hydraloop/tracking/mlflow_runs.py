"""Experiments, runs and files at MLflow: the address, names, parameters, tags, metrics and artifacts."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shlex
import sqlite3
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from filelock import FileLock

from hydraloop.files import atomic
from hydraloop.files.atomic import file_name
from hydraloop.files.checkpoint_files import is_complete
from hydraloop.files.metrics_log import Record
from hydraloop.files.result import FILENAME as RESULT_FILE
from hydraloop.files.run_directory import SWEEP_FILE
from hydraloop.files.secrets import MASK, mask_text
from hydraloop.tracking import run_description
from hydraloop.tracking.cursor import lock_of
from hydraloop.tracking.tracker import RefusedError, Run, Sweep, UnusableError, own

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

VARIABLE = "MLFLOW_TRACKING_URI"
_SQLITE = "sqlite:///"
_DEFAULT = f"{_SQLITE}mlflow.db"
"""MLflow's default, in the folder in which `mlflow ui` is started."""
_PATIENCE = 60.0
"""Seconds to wait while another process creates the database, which takes about 2 s."""
_LOCAL = "http://localhost:5000"
"""Address of `mlflow ui`."""
_ELSEWHERE = "choose another place: hooks.mlflow.tracking_uri=sqlite:////path/to/mlflow.db"


def address_of(options: Mapping[str, Any], known: str | None = None) -> str:
    """Return the tracking URI: that of the option, of the environment, or else `mlflow.db`.

    A relative path belongs to the option `folder`. The option `environment` is the address in the environment of the
    command that started the run.

    Args:
        known: the address of the existing run. It counts if the run's own options name it: a cursor may come from
            someone else.

    Raises:
        UnusableError: the address does not name a file for a database.
    """

    def full(uri: str) -> str:
        path = sqlite_path(uri)
        return with_password(uri) if path is None else sqlite_uri(Path(options.get("folder") or Path.cwd()) / path)

    then = options.get("environment") or _DEFAULT
    if options.get("tracking_uri"):
        return full(str(options["tracking_uri"]))
    if known is not None and known == shown(full(then)):
        return full(then)
    return full(os.environ.get(VARIABLE) or then)


def sqlite_uri(path: Path) -> str:
    """Return the address of a database."""
    return f"{_SQLITE}{path}"


def with_password(uri: str) -> str:
    """Return an address with the user and password that `MLFLOW_TRACKING_URI` has for it: they are not stored.

    Without them, a masked one is returned without both: MLflow then takes them from its other variables.
    """
    uri, now = shown(uri) if MASK in uri else uri, os.environ.get(VARIABLE, "")
    return now if uri.rstrip("/") == shown(now) else uri


def sqlite_path(uri: str) -> Path | None:
    """Return the file of an SQLite address, which may be relative, or None for any other address.

    Raises:
        UnusableError: the address does not name a file, so its contents would be lost; or it contains a `?` or a `%`,
            with which SQLAlchemy and MLflow would open other files.
    """
    if not uri.startswith("sqlite:"):
        return None
    name = uri.removeprefix(_SQLITE)
    if name in ("", ":memory:", uri) or "?" in name or "%" in name:
        raise UnusableError(f"{uri!r} does not name a file, or contains a ? or %; {_ELSEWHERE}")
    return Path(name)


def shown(uri: str) -> str:
    """Return an address without user, password and slash at the end, for people and files, and to compare it."""
    user, at, _ = urlsplit(uri).netloc.rpartition("@")
    return uri.replace(f"//{user}{at}", "//", 1).rstrip("/")


def page(uri: str, path: str) -> str | None:
    """Return the address of a page of MLflow; for an SQLite database, the command to run and the address to open.

    MLflow 3 opens *GenAI* unless the path has `workflowType=machine_learning`.
    """
    if not uri.startswith("sqlite:"):
        return f"{shown(uri)}/#/{path}" if uri.startswith(("http:", "https:")) else None
    is_default = uri == sqlite_uri(Path.cwd() / "mlflow.db")
    command = "mlflow ui" if is_default else f"mlflow ui --backend-store-uri {shlex.quote(uri)}"
    return f"run `{command}` and open {_LOCAL}/#/{path}"


def connected(uri: str) -> MlflowClient:
    """Return a client. A local SQLite database is created if necessary, by one process at a time.

    Raises:
        UnusableError: a database cannot be created.
    """
    from mlflow import MlflowClient

    path = sqlite_path(uri)
    if path is not None and not path.exists():
        try:
            _create(path)
        except (PermissionError, FileExistsError, FileNotFoundError, NotADirectoryError) as error:
            raise UnusableError(f"{path}: {error.strerror}; {_ELSEWHERE}") from error
    return MlflowClient(tracking_uri=uri)


def _create(path: Path) -> None:
    """Create a database under another name, and rename it when it is complete, also if a process is killed."""
    from mlflow import MlflowClient

    path.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{path}.lock").touch()  # fails at once, whereas the lock would retry for a minute
    with FileLock(f"{path}.lock", timeout=_PATIENCE):
        if not path.exists():
            atomic.remove_unfinished(path)  # of a process that was killed here, when the time after its run was over
            with atomic.replacing(path) as unfinished, unsynced():
                MlflowClient(tracking_uri=sqlite_uri(unfinished))


@contextlib.contextmanager
def unsynced() -> Iterator[None]:
    """Let SQLite not wait for the disk: the about 100 transactions of a new database would take 5 s or more."""
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    def relax(connection: sqlite3.Connection, _: object) -> None:
        connection.execute("PRAGMA synchronous=OFF")
        connection.execute("PRAGMA journal_mode=MEMORY")

    event.listen(Engine, "connect", relax)
    try:
        yield
    finally:
        event.remove(Engine, "connect", relax)


UID = "hydraloop.run"
"""Tag by which a run is found again."""
_TARGET = "_target_"
_TRACKERS = ("MLflowLoggerHook", "TensorBoardLoggerHook", "WandbLoggerHook")
_LONGEST_NAME, _LONGEST_TAG = 250, 8000
"""Most characters of a name and of a tag. MLflow shortens values itself, except for the tags of a new run."""
_BAD = r"[^\w.\- :/]"


@lru_cache(maxsize=4096)
def clean(name: str) -> str:
    """Return a name of a metric, parameter or tag that MLflow accepts.

    MLflow refuses most signs, and parts such as `..` that would change a path. They become `_`. A changed name gets a
    digest, so that different names stay different.
    """
    parts = ["_" if part in ("", ".", "..") else re.sub(_BAD, "_", part) for part in name.split("/")]
    text = "/".join(parts)
    if text != name:
        text += f"_{hashlib.sha256(name.encode(errors='replace')).hexdigest()[:6]}"
    return file_name(text, _BAD, longest=_LONGEST_NAME)


def experiment_of(client: MlflowClient, name: str, uri: str) -> str:
    """Return the id of an experiment, which is created if it does not exist."""
    found = client.get_experiment_by_name(name)
    if found is not None:
        return str(found.experiment_id)
    path, location = sqlite_path(uri), None
    if path is not None:
        # Next to the database. MLflow's default is the working directory of the process that creates it.
        location = str(path.parent / "mlruns" / clean(name).replace("/", "_"))
    return str(client.create_experiment(name, artifact_location=location))


def find(client: MlflowClient, experiment_id: str, uid: str) -> str | None:
    """Return the run with a tag `hydraloop.run`, which an earlier process may have created before it was killed."""
    found = client.search_runs([experiment_id], f"tags.`{UID}` = '{uid}'", max_results=1)
    return str(found[0].info.run_id) if found else None


def ensure(client: MlflowClient, experiment_id: str, uid: str, name: str, tags: Mapping[str, Any], began: float) -> str:
    """Return the id of the run with a tag `hydraloop.run`, which is created if it does not exist."""
    if (run_id := find(client, experiment_id, uid)) is not None:
        return run_id
    given = {clean(str(key)): str(value)[:_LONGEST_TAG] for key, value in tags.items()}
    run = client.create_run(experiment_id, start_time=round(began * 1000), tags={**given, UID: uid}, run_name=name)
    return str(run.info.run_id)


def ensure_parent(client: MlflowClient, sweep: Sweep, experiment_id: str, tags: Mapping[str, Any]) -> str:
    """Return the id of the run whose children are the jobs of a sweep, which is created if it does not exist.

    It has the user's tags, and is finished from the beginning: only the jobs have a status and metrics.
    """
    given = {"sweep": sweep.name, "sweep_dir": sweep.folder, **tags}
    # Several jobs share a sender, and that of a killed controller still sends when the next one starts.
    with lock_of(sweep.folder, "mlflow") if (sweep.folder / SWEEP_FILE).is_file() else nullcontext():
        run_id = find(client, experiment_id, sweep.uid)
        if run_id is None:
            run_id = ensure(client, experiment_id, sweep.uid, sweep.name.rpartition("/")[2], given, sweep.began)
            client.set_terminated(run_id)
    return run_id


def tags_of(run: Run, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a new run's tags: those of the run, under MLflow's names where it has them, and the user's."""
    tags: dict[str, Any] = dict(run.attempts[0].tags)
    names = {"git_commit": "mlflow.source.git.commit", "user": "mlflow.user"}
    tags |= {name: tags.pop(key) for key, name in names.items() if key in tags}
    if run.sweep is not None:
        tags |= {"sweep": run.sweep.name, "job": run.sweep.job}
    return tags | (options.get("tags") or {})


def params_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the entries of a flattened config that distinguish runs; `config.yaml` has them all.

    Nulls, empty lists and the options of trackers are left out. `optimizer._target_=torch.optim.AdamW` becomes
    `optimizer=AdamW`, except for hooks, which have the name of their class.
    """
    targets = {key.removesuffix(f".{_TARGET}"): value for key, value in config.items() if key.endswith(f".{_TARGET}")}
    trackers = tuple(f"{key}." for key, value in targets.items() if str(value).rpartition(".")[2] in _TRACKERS)
    params = {}
    for key, value in config.items():
        node, _, name = key.rpartition(".")
        if value in (None, "{}", "[]") or key.startswith(trackers):
            continue
        if not name.startswith("_"):
            params[key] = str(value).lower() if isinstance(value, bool) else str(value)  # as in the config
        elif name == _TARGET and not node.startswith(("hooks.", "default_hooks.")):
            params[node or name] = str(value).rpartition(".")[2]
    return params


def log_params(client: MlflowClient, run_id: str, params: Mapping[str, str]) -> None:
    """Log parameters."""
    from mlflow.entities import Param

    client.log_batch(run_id, params=[Param(clean(key), text) for key, text in params.items()])


class Points:
    """Sends the points of one run. MLflow cannot delete any.

    A call may be repeated: MLflow stores points of equal name, value, time and step once. If a resumed run repeats
    iterations, equal values are not sent again. Others are, with their later time, and become the latest.

    Args:
        memory: the tracker's memory. `again_from`: the iteration from which points of an earlier attempt may exist.
    """

    def __init__(self, client: MlflowClient, run_id: str, memory: Mapping[str, Any]) -> None:
        self._client, self._run_id, self._memory = client, run_id, memory
        self._there: dict[str, dict[int, float | str]] = {}
        """By metric and step, the newest value at MLflow of points that may be repeated."""

    def send(self, records: Sequence[Record]) -> None:
        """Send the points whose value differs from the newest one of their step."""
        try:
            self._client.log_batch(self._run_id, list(self._new(records)))
        except Exception:
            self._there.clear()  # it is unknown which points have arrived
            raise

    def _new(self, records: Sequence[Record]) -> Iterator[Metric]:
        from mlflow.entities import Metric

        again = self._memory.get("again_from", math.inf)
        for record in records:
            time_ms, step = round(record.timestamp * 1000), record.iteration
            for name, value in record.metrics.items():
                key = clean(name)
                if step >= again:
                    there, kept = self._before(key), _as_kept(value)
                    if there.get(step) == kept:
                        continue
                    there[step] = kept
                yield Metric(key, value, time_ms, step)

    def _before(self, key: str) -> dict[int, float | str]:
        if key not in self._there:
            points = sorted(self._client.get_metric_history(self._run_id, key), key=lambda point: point.timestamp)
            again = self._memory["again_from"]
            self._there[key] = {point.step: _as_kept(point.value) for point in points if point.step >= again}
        return self._there[key]


def send_best(client: MlflowClient, run_id: str, run: Run, ended: int) -> None:
    """Send the best value as a metric such as `best/accuracy`.

    Args:
        ended: when the run ended, in milliseconds.
    """
    from mlflow.entities import Metric

    best = run_description.result_of(run.run_dir, run.attempt).get("best")
    if best:
        name = clean(f"best/{best['metric']}")
        client.log_batch(run_id, [Metric(name, float(best["value"]), ended, best["iteration"])])


def _as_kept(value: float) -> float | str:
    """Return a value as a database returns it, without infinity, and in a form that compares equal to itself."""
    return "nan" if math.isnan(value) else max(min(value, sys.float_info.max), -sys.float_info.max)


CHECKPOINTS = "checkpoints"
"""Folder of the artifacts."""
_NOT_IN_A_KEY = r"[^A-Za-z0-9_\-./ ]"
"""What `log_image` refuses in a picture's key."""


class Files:
    """The artifacts of one run. `memory`: `due`, what is to be stored."""

    def __init__(
        self, client: MlflowClient, run_id: str, run: Run, options: Mapping[str, Any], memory: dict[str, Any]
    ) -> None:
        self._client, self._run_id, self._run, self._options = client, run_id, run, options
        self.due: list[dict[str, Any]] = memory.setdefault("due", [])
        self._there: list[str] | None = None
        """Beginnings of the paths of the stored pictures; None: they are not known, because a call may have failed."""

    def add_attempt(self, number: int) -> None:
        """Schedule an attempt's config for storing, and with `log_code` its uncommitted changes."""
        self.due.append({"config": number})
        if self._options.get("log_code") and self._run.attempts[number].patch is not None:
            self.due.append({"code": number})

    def add_objects(self, records: Sequence[Record]) -> None:
        """Schedule the objects of records for storing."""
        for record in records:
            place = {"index": record.index, "step": record.iteration, "time": round(record.timestamp * 1000)}
            self.due.extend({"kind": one.kind, "name": one.name, "path": one.path, **place} for one in record.objects)

    def add_end(self) -> None:
        """Schedule the result for storing, and the checkpoints that the options select."""
        self.due.append({"end": self._run.attempt.number})

    def store(self, one: Mapping[str, Any]) -> None:
        """Store what is scheduled.

        Raises:
            RefusedError: a file is damaged, or is no file of the run.
        """
        run_dir = self._run.run_dir
        if "config" in one:
            number = one["config"]
            name = "config.yaml" if number == 0 else f"config_resume_{number}.yaml"
            self._client.log_text(self._run_id, self._run.attempts[number].config, name)
        elif "code" in one:
            number = one["code"]
            patch = own(run_dir, run_dir / str(self._run.attempts[number].patch))
            self._client.log_artifact(self._run_id, str(patch), None if number == 0 else f"resume_{number}")
        elif "end" in one:
            self._store_end()
        else:
            self._store_object(own(run_dir, run_dir / one["path"]), one)

    def _store_end(self) -> None:
        result = run_description.result_of(self._run.run_dir, self._run.attempt)
        if result:
            text = own(self._run.run_dir, self._run.run_dir / RESULT_FILE).read_text(encoding="utf-8")
            self._client.log_text(self._run_id, mask_text(text), RESULT_FILE)
        best = (result.get("best") or {}).get("checkpoint")
        which, foreign = self._options.get("checkpoints"), bool(self._options.get("_sync"))
        for path in run_description.checkpoints(self._run, which, best, ended=True, foreign=foreign):
            if is_complete(path):
                self._client.log_artifact(self._run_id, str(path), CHECKPOINTS)

    def _store_object(self, path: Path, one: Mapping[str, Any]) -> None:
        """Store an object of a record under its path in the run directory; pictures where MLflow's charts find them."""
        if one["kind"] == "image":
            self._store_picture(path, one)
        elif one["kind"] == "table":
            self._client.log_dict(self._run_id, _read(_table, path), one["path"])
        else:
            self._client.log_artifact(self._run_id, str(path), one["path"].rpartition("/")[0] or None)

    def _store_picture(self, path: Path, one: Mapping[str, Any]) -> None:
        """Store a picture, unless a call that failed halfway has: MLflow gives it another name each time."""
        key = "/".join(file_name(part, _NOT_IN_A_KEY) for part in one["name"].split("/"))
        name = f"images/{key.replace('/', '~')}+step+{one['step']}+timestamp+{one['time']}+"
        there = self._there
        if there is None:
            there = [file.path for file in self._client.list_artifacts(self._run_id, "images")]
        if any(other.startswith(name) for other in there):
            self._client.set_tag(self._run_id, "mlflow.loggedImages", "True")
        else:
            picture, self._there = _read(_picture, path), None
            self._client.log_image(self._run_id, picture, key=key, step=one["step"], timestamp=one["time"])
        self._there = [*there, name]


def _table(path: Path) -> dict[str, Any]:
    table = json.loads(path.read_bytes())
    return {"columns": table["columns"], "data": table["rows"]}


def _picture(path: Path) -> Any:
    from PIL import Image

    with Image.open(path) as picture:
        return picture.convert(picture.mode if picture.mode in ("RGB", "RGBA") else "RGB")


def _read(read: Callable[[Path], Any], path: Path) -> Any:
    """Read a file, which may be damaged."""
    try:
        return read(path)
    except Exception as error:  # decoders raise any error
        raise RefusedError(f"{path}: {getattr(error, 'strerror', None) or error!r}") from error
