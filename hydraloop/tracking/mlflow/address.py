"""Where MLflow keeps runs: which address is meant, and an SQLite database that several jobs may open at once."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import sqlite3
import subprocess
import sys
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
"""MLflow's own default, in the folder that `mlflow ui` is started in."""
_VARIABLE = "MLFLOW_TRACKING_URI"
_SQLITE = "sqlite:///"
_PATIENCE = 60.0
"""Seconds to wait while another process creates or migrates the database: that takes some 2 s."""
_WORDS = ("databricks", "databricks-uc", "uc")
"""Addresses of which MLflow needs to know no more."""
_ELSEWHERE = "choose another place: hooks.mlflow.tracking_uri=sqlite:////path/to/mlflow.db"


def address_of(options: Mapping[str, Any], memory: Mapping[str, Any]) -> str:
    """The tracking URI: the option, else where the run is already, else the environment's, else `mlflow.db`.

    Args:
        options: `tracking_uri`; `folder`, where the user typed the command, absolute; `environment`, the address that
            was in the environment there.
        memory: of the tracker, `tracking_uri` in it.

    Raises:
        UnusableError: it names no file that a database can be in.
    """
    now = os.environ.get(_VARIABLE)
    chosen, then = (
        now or given if given is not None and MASK in given else given  # a password is not written down
        for given in (options.get("tracking_uri"), options.get("environment"))
    )
    uri = chosen or memory.get("tracking_uri") or now or then or _SQLITE + DATABASE
    path = sqlite_path(str(uri))
    if path is None:
        return str(uri)
    path = Path(options.get("folder") or Path.cwd()) / path
    if "?" in str(path):
        raise UnusableError(f"{path} has a ? in it, at which the address of a database ends; {_ELSEWHERE}")
    return _SQLITE + str(path)


def sqlite_path(uri: str) -> Path | None:
    """The file of an SQLite address as it is written there; None of any other address.

    Raises:
        UnusableError: it names no file, and what it keeps would be lost.
    """
    if not uri.startswith("sqlite:"):
        return None
    name = uri.removeprefix(_SQLITE).partition("?")[0] if uri.startswith(_SQLITE) else ""
    if name in ("", ":memory:"):
        raise UnusableError(f"{uri!r} names no file; {_ELSEWHERE}")
    return Path(name)


def has_password(uri: str) -> bool:
    """Whether an address holds what must not be written down."""
    return "@" in urlsplit(uri).netloc


def shown(uri: str) -> str:
    """An address for people: without user and password."""
    user, at, _ = urlsplit(uri).netloc.rpartition("@")
    return uri.replace(f"//{user}{at}", "//", 1)


def is_default(uri: str, folder: Path) -> bool:
    """Whether it is the database that MLflow itself takes in `folder`."""
    return uri == f"{_SQLITE}{folder / DATABASE}"


def command(uri: str, folder: Path) -> str:
    """The command that shows what an SQLite database has, typed in `folder`."""
    if not is_default(uri, folder):
        return f"mlflow ui --backend-store-uri {shlex.quote(uri)}"
    return f"mlflow ui --backend-store-uri {_SQLITE}{DATABASE}" if has_old_runs(folder) else "mlflow ui"


def restoring(uri: str, arguments: str) -> str:
    """A command of MLflow's that asks for what was deleted at an address."""
    return f"{_VARIABLE}={shlex.quote(shown(uri))} mlflow {arguments}"


def has_old_runs(folder: Path) -> bool:
    """Whether `mlflow ui` would show the files of an earlier MLflow in `folder` instead of the database.

    Those are experiments in `./mlruns` with a meta.yaml; artifacts of runs in a database have none.
    """
    return any(path.parent.name.isdigit() for path in (folder / "mlruns").glob("*/meta.yaml"))


def prepare_database(uri: str) -> None:
    """Create a local SQLite database, or bring it to the schema of this MLflow; nothing for any other address.

    For whoever starts several jobs at once. Each of them does the same when it opens, so this only saves time.
    """
    connected(uri)


def connected(uri: str) -> MlflowClient:
    """A client. A local SQLite database is created if need be, by one process at a time.

    MLflow creates and migrates a database in many steps; several processes doing so at once break it. A new one is made
    under another name and appears under its own when it is whole, so that a killed process leaves none half-made.

    Raises:
        UnusableError: there can be no database, or it is one of a newer MLflow.
    """
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    path = sqlite_path(uri)
    if path is None:
        if uri.startswith("file:") or (":" not in uri.replace(":\\", "") and uri not in _WORDS):
            # Newer versions refuse it themselves; in older ones what is sent again would be there twice.
            raise UnusableError(f"{uri!r} is a plain folder, where MLflow keeps no runs any more; {_ELSEWHERE}")
        return MlflowClient(tracking_uri=uri)
    with _locked(path):
        if not path.exists():
            _create(path)
        _check(path)
        _keep_older(path)
        try:
            return MlflowClient(tracking_uri=uri)
        except MlflowException as error:
            if "out-of-date database schema" not in str(error):
                raise
        _migrate(path, uri)
        return MlflowClient(tracking_uri=uri)


_PASSING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EINTR, errno.EIO, errno.EMFILE, errno.ENFILE})


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = FileLock(f"{path}.lock", timeout=_PATIENCE)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        Path(lock.lock_file).touch()  # the lock itself would try for a minute
        lock.acquire()
    except TimeoutError:
        raise
    except OSError as error:
        if error.errno in _PASSING:
            raise
        raise UnusableError(
            f"no database can be made in {path.parent} ({error.strerror or error}); {_ELSEWHERE}"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _create(path: Path) -> None:
    from mlflow import MlflowClient

    with atomic.replacing(path, keep_existing=True) as unfinished, _unsynced():
        MlflowClient(tracking_uri=_SQLITE + str(unfinished))


@contextlib.contextmanager
def _unsynced() -> Iterator[None]:
    """Nothing waits for the disk: a hundred small changes would, each for itself, 5 s in all and more on a busy one."""
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
    """See at once what MLflow would find out in 100 s of tries: whether the file can be written."""
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=1.0, isolation_level=None)) as database:
            database.execute("BEGIN IMMEDIATE")
            database.execute("ROLLBACK")
    except sqlite3.DatabaseError as error:
        text = str(error)
        if any(words in text for words in ("locked", "full", "disk I/O")):
            raise
        raise UnusableError(f"{path}: {text}; {_ELSEWHERE}") from error


def _keep_older(path: Path) -> None:
    """Copy a database of an older MLflow: this one changes it when it opens it, and there is no way back.

    Raises:
        UnusableError: it is one of a newer MLflow.
    """
    import mlflow
    from alembic.script import ScriptDirectory
    from alembic.util import CommandError

    with contextlib.closing(sqlite3.connect(path)) as database:
        try:
            (revision,) = database.execute("SELECT version_num FROM alembic_version").fetchone() or (None,)
        except sqlite3.OperationalError:  # it is empty
            revision = None
        scripts = ScriptDirectory(str(Path(mlflow.__file__).parent / "store" / "db_migrations"))
        if revision is None or revision == scripts.get_current_head():
            return
        try:
            scripts.get_revision(revision)
        except CommandError as error:
            raise UnusableError(
                f"{path} is a database of a newer MLflow than this one ({mlflow.__version__}); {_ELSEWHERE}"
            ) from error
        with contextlib.closing(sqlite3.connect(path.with_name(f"{path.name}.{revision}.bak"))) as copy:
            database.backup(copy)


def _migrate(path: Path, uri: str) -> None:
    """By MLflow's own command, where it does not do so by itself."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "mlflow", "db", "upgrade", uri],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UnusableError(f"{path} cannot be brought to the schema of this MLflow: {last}; {_ELSEWHERE}")
