"""Where MLflow stores runs: the address, and a local SQLite database that several jobs may open at the same time."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shlex
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from filelock import FileLock

from hydraloop.run import atomic
from hydraloop.safety.secrets import MASK
from hydraloop.tracking.tracker import UnusableError

if TYPE_CHECKING:
    from mlflow import MlflowClient

DATABASE = "mlflow.db"
"""MLflow's default database, in the folder in which `mlflow ui` is started."""
_VARIABLE = "MLFLOW_TRACKING_URI"
_SQLITE = "sqlite:///"
_PATIENCE = 60.0
"""Seconds to wait while another process creates the database, which takes about 2 s."""
_LOCAL = "http://localhost:5000"
"""Address of `mlflow ui`."""
_WORDS = ("databricks", "databricks-uc", "uc")
"""Addresses without a scheme that MLflow accepts."""
_ELSEWHERE = "choose another place: hooks.mlflow.tracking_uri=sqlite:////path/to/mlflow.db"


def address_of(options: Mapping[str, Any], memory: Mapping[str, Any]) -> str:
    """Return the tracking URI: that of the option, of the existing run, of the environment, or else `mlflow.db`.

    Args:
        options: `tracking_uri`; `folder`, the absolute path of the folder in which the command was typed;
            `environment`, the address in the environment of that command.
        memory: the tracker's memory, which may contain `tracking_uri`.

    Raises:
        UnusableError: the address does not name a file for a database.
    """
    now = os.environ.get(_VARIABLE)
    chosen, then = (
        now or given if given is not None and MASK in given else given  # addresses with passwords are stored masked
        for given in (options.get("tracking_uri"), options.get("environment"))
    )
    uri = chosen or memory.get("tracking_uri") or now or then or _SQLITE + DATABASE
    path = sqlite_path(str(uri))
    if path is None:
        return str(uri)
    path = Path(options.get("folder") or Path.cwd()) / path
    if "?" in str(path):
        raise UnusableError(f"{path} contains a ?, which would end the address of the database; {_ELSEWHERE}")
    return _SQLITE + str(path)


def sqlite_path(uri: str) -> Path | None:
    """Return the file of an SQLite address, which may be relative, or None for any other address.

    Raises:
        UnusableError: the address does not name a file, so its contents would be lost.
    """
    if not uri.startswith("sqlite:"):
        return None
    name = uri.removeprefix(_SQLITE).partition("?")[0] if uri.startswith(_SQLITE) else ""
    if name in ("", ":memory:"):
        raise UnusableError(f"{uri!r} does not name a file; {_ELSEWHERE}")
    return Path(name)


def has_password(uri: str) -> bool:
    """Return whether an address contains a user or password, which must not be stored."""
    return "@" in urlsplit(uri).netloc


def shown(uri: str) -> str:
    """Return an address without user and password, for people."""
    user, at, _ = urlsplit(uri).netloc.rpartition("@")
    return uri.replace(f"//{user}{at}", "//", 1)


def is_default(uri: str, folder: Path) -> bool:
    """Return whether an address is the database that MLflow uses by default in `folder`."""
    return uri == f"{_SQLITE}{folder / DATABASE}"


def page(uri: str, folder: Path, experiment_id: str, run_id: str) -> str | None:
    """Return where a person finds a run: its page on a server; for an SQLite database, after the command for it.

    MLflow 3 opens *GenAI* unless the address names the other part of its page.
    """
    path = f"/#/experiments/{experiment_id}/runs/{run_id}?workflowType=machine_learning"
    if uri.startswith("sqlite:"):
        return f"{command(uri, folder)}, {_LOCAL}{path}"
    return shown(uri).rstrip("/") + path if uri.startswith(("http:", "https:")) else None


def command(uri: str, folder: Path) -> str:
    """Return the command that shows an SQLite database, for a user in `folder`."""
    if not is_default(uri, folder):
        return f"mlflow ui --backend-store-uri {shlex.quote(uri)}"
    return f"mlflow ui --backend-store-uri {_SQLITE}{DATABASE}" if has_old_runs(folder) else "mlflow ui"


def restoring(uri: str, arguments: str) -> str:
    """Return the command that runs `mlflow <arguments>` for an address, for example to restore what was deleted."""
    return f"{_VARIABLE}={shlex.quote(shown(uri))} mlflow {arguments}"


def has_old_runs(folder: Path) -> bool:
    """Return whether `mlflow ui` would show the files of an earlier MLflow in `folder` instead of the database.

    These are experiments in `./mlruns` with a meta.yaml. Artifacts of runs in a database do not have that file.
    """
    return any(path.parent.name.isdigit() for path in (folder / "mlruns").glob("*/meta.yaml"))


def connected(uri: str) -> MlflowClient:
    """Return a client. A local SQLite database is created if necessary, by one process at a time.

    MLflow creates a database in many steps, and several processes doing so at once would break it. A new database is
    created under another name and renamed when it is complete, also if a process is killed.

    Raises:
        UnusableError: a database cannot be created, or it belongs to another version of MLflow.
    """
    from mlflow import MlflowClient

    path = sqlite_path(uri)
    if path is None:
        if uri.startswith("file:") or (":" not in uri.replace(":\\", "") and uri not in _WORDS):
            raise UnusableError(f"{uri!r} is a plain folder, which MLflow does not support any more; {_ELSEWHERE}")
        return MlflowClient(tracking_uri=uri)
    with _locked(path):
        if not path.exists():
            _create(path)
        _check(path)
        _check_version(path, uri)
        return MlflowClient(tracking_uri=uri)


_PASSING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EINTR, errno.EIO, errno.EMFILE, errno.ENFILE})


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = FileLock(f"{path}.lock", timeout=_PATIENCE)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        Path(lock.lock_file).touch()  # fails at once, whereas the lock would retry for a minute
        lock.acquire()
    except TimeoutError:
        raise
    except OSError as error:
        if error.errno in _PASSING:
            raise
        raise UnusableError(
            f"cannot create a database in {path.parent} ({error.strerror or error}); {_ELSEWHERE}"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _create(path: Path) -> None:
    from mlflow import MlflowClient

    with atomic.replacing(path, keep_existing=True) as unfinished, unsynced():
        MlflowClient(tracking_uri=_SQLITE + str(unfinished))


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


def _check(path: Path) -> None:
    """Check that the database can be written. MLflow itself would try for 100 s."""
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=1.0, isolation_level=None)) as database:
            database.execute("BEGIN IMMEDIATE")
            database.execute("ROLLBACK")
    except sqlite3.DatabaseError as error:
        text = str(error)
        if any(words in text for words in ("locked", "full", "disk I/O")):
            raise
        raise UnusableError(f"{path}: {text}; {_ELSEWHERE}") from error


def _check_version(path: Path, uri: str) -> None:
    """Check that a database has the schema of the installed MLflow, which would migrate an older one irreversibly.

    The texts of the migrations are searched: executing them, as MLflow does, takes much longer.
    """
    import mlflow

    with contextlib.closing(sqlite3.connect(path)) as database:
        try:
            (revision,) = database.execute("SELECT version_num FROM alembic_version").fetchone() or (None,)
        except sqlite3.OperationalError:  # the database is empty
            return
    folder = Path(mlflow.__file__).parent / "store" / "db_migrations" / "versions"
    scripts = "\n".join(script.read_text(encoding="utf-8") for script in folder.glob("*.py"))
    name = rf"['\"]{re.escape(str(revision))}['\"]"
    if re.search(rf"^down_revision\b.*{name}", scripts, re.MULTILINE):
        command = f"mlflow db upgrade {shlex.quote(uri)}"
        raise UnusableError(f"{path} is a database of an older MLflow: copy it, then run `{command}`; or {_ELSEWHERE}")
    if revision is not None and not re.search(rf"^revision\b.*{name}", scripts, re.MULTILINE):
        raise UnusableError(
            f"{path} is a database of a newer MLflow than the installed {mlflow.__version__}; {_ELSEWHERE}"
        )
