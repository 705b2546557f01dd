"""Where MLflow stores runs: the address, and a local SQLite database that several jobs may open at the same time."""

from __future__ import annotations

import contextlib
import os
import shlex
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlsplit

from filelock import FileLock

from hydraloop.files import atomic
from hydraloop.files.secrets import MASK
from hydraloop.tracking.tracker import UnusableError

if TYPE_CHECKING:
    from mlflow import MlflowClient

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
    """Return the address of a database.

    If a `%` or `?` must be encoded, slashes are encoded, too: MLflow creates the folder that it reads in the encoded
    address, which is another one.
    """
    name = str(path)
    return _SQLITE + (quote(name, safe="") if "%" in name or "?" in name else name)


def with_password(uri: str) -> str:
    """Return an address with the user and password that `MLFLOW_TRACKING_URI` has for it: they are not stored.

    Without them, a masked one is returned without both: MLflow then takes them from its other variables.
    """
    uri, now = shown(uri) if MASK in uri else uri, os.environ.get(VARIABLE, "")
    return now if uri.rstrip("/") == shown(now) else uri


def sqlite_path(uri: str) -> Path | None:
    """Return the file of an SQLite address, which may be relative, or None for any other address.

    Raises:
        UnusableError: the address does not name a file, so its contents would be lost, or it contains a `?`.
    """
    if not uri.startswith("sqlite:"):
        return None
    name = uri.removeprefix(_SQLITE)
    if name in ("", ":memory:", uri) or "?" in name:
        raise UnusableError(f"{uri!r} does not name a file, or contains a ?; {_ELSEWHERE}")
    return Path(unquote(name))


def shown(uri: str) -> str:
    """Return an address without user, password and slash at the end, for people and files, and to compare it."""
    user, at, _ = urlsplit(uri).netloc.rpartition("@")
    return uri.replace(f"//{user}{at}", "//", 1).rstrip("/")


def page(uri: str, path: str) -> str | None:
    """Return where a person finds a page of MLflow; for an SQLite database, after the command to type.

    MLflow 3 opens *GenAI* unless the path has `workflowType=machine_learning`.
    """
    if not uri.startswith("sqlite:"):
        return f"{shown(uri)}/#/{path}" if uri.startswith(("http:", "https:")) else None
    is_default = uri == sqlite_uri(Path.cwd() / "mlflow.db")
    command = "mlflow ui" if is_default else f"mlflow ui --backend-store-uri {shlex.quote(uri)}"
    return f"{command}, {_LOCAL}/#/{path}"


def connected(uri: str) -> MlflowClient:
    """Return a client. A local SQLite database is created if necessary, by one process at a time.

    Raises:
        UnusableError: a database cannot be created, or SQLAlchemy is too old for the signs in its path.
    """
    from mlflow import MlflowClient
    from sqlalchemy import engine

    path = sqlite_path(uri)
    if path is not None and not path.exists():
        if Path(str(engine.make_url(uri).database)) != path:
            raise UnusableError(f"a path with a % or ? needs: pip install 'sqlalchemy>=2.1'; or {_ELSEWHERE}")
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
