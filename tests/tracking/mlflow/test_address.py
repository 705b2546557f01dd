"""Addresses of MLflow, the commands that show them, and databases that several processes open."""

from __future__ import annotations

import multiprocessing
import os
import shlex
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy.engine import URL, make_url

from hydraloop.tracking.mlflow import address as address
from hydraloop.tracking.tracker import BusyError, Finish, UnusableError
from tests.small_disk import small_disk
from tests.tracking.mlflow.runs import (
    QUIET,
    client,
    empty_database,
    folder,
    opened,
    points,
    run_in,
    send_files,
    training,
)

__all__ = ["empty_database", "folder"]
pytestmark = QUIET


def test_which_address_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"folder": str(tmp_path)}
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert address.address_of(here, {}) == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:pass@server:5000")
    assert address.address_of(here, {}) == "http://me:pass@server:5000"
    assert address.address_of(here, {"tracking_uri": "http://was"}) == "http://was"
    assert address.address_of({**here, "tracking_uri": "http://new"}, {"tracking_uri": "http://was"}) == "http://new"
    assert address.address_of({**here, "tracking_uri": "http://me:***@server:5000"}, {}) == "http://me:pass@server:5000"
    assert address.address_of({**here, "tracking_uri": "sqlite:///a/b.db"}, {}) == f"sqlite:///{tmp_path}/a/b.db"
    assert address.address_of({**here, "tracking_uri": "sqlite:////a/b.db"}, {}) == "sqlite:////a/b.db"
    # Where the environment has none now, as for `sync.py` in another shell, the run's counts; it can be put right.
    then = {**here, "environment": "http://me:***@then:5000"}
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:pass@then:5000")
    assert address.address_of(then, {}) == "http://me:pass@then:5000"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://right")
    assert address.address_of({**here, "environment": "http://wrong"}, {}) == "http://right"
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert address.address_of({**here, "environment": "http://then"}, {}) == "http://then"
    assert address.address_of({**here, "environment": "http://then"}, {"tracking_uri": "http://was"}) == "http://was"
    assert address.shown("http://me:pass@server:5000/x") == "http://server:5000/x"
    # The address of an existing run is stored without its password.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:pass@was")
    assert address.address_of(here, {"tracking_uri": "http://was"}) == "http://me:pass@was"


@pytest.mark.parametrize(
    ("stored", "now", "expected"),
    [
        ("http://bob:***@server:5000", "http://server:5000", "http://server:5000"),
        ("http://bob:***@server:5000", "http://other:5000", "http://server:5000"),
        ("http://bob:***@server:5000", "", "http://server:5000"),
        ("http://bob:***@server:5000/", "http://me:pass@server:5000", "http://me:pass@server:5000"),
        ("http://server:5000/", "http://me:pass@server:5000", "http://me:pass@server:5000"),
        ("http://server:5000", "http://me:pass@server:5000/", "http://me:pass@server:5000/"),
        ("http://bob:pass@server:5000", "http://server:5000", "http://bob:pass@server:5000"),
        ("http://bob:pass@server:5000", "http://me:pass@server:5000", "http://bob:pass@server:5000"),
    ],
)
def test_a_password_that_is_not_stored(stored: str, now: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one in `MLFLOW_TRACKING_URI`, MLflow takes it from `MLFLOW_TRACKING_USERNAME` and `_PASSWORD`."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", now)
    assert address.address_of({"tracking_uri": stored}, {}) == expected


def test_an_address_with_a_question_mark(folder: Path) -> None:
    with pytest.raises(UnusableError, match=r"contains a \?.*hooks\.mlflow\.tracking_uri"):
        opened(run_in(folder / "run"), tracking_uri="sqlite:///a.db?timeout=5")


@pytest.mark.parametrize(
    "name",
    ["per%20cent", "100%", "what?", "%3F?#", "hash#1", "with space", "a&b=c;d", "uml\u00e4ut", "it's [1]+{2}@x:8"],
)
def test_signs_in_the_path_of_a_project(name: str, folder: Path, empty_database: Path) -> None:
    project = folder / "parent" / name
    run = run_in(project / "outputs" / name)
    shutil.copy(empty_database, project)
    tracker = opened(run, folder=str(project))
    tracker.send(training(0, 2))
    tracker.finish(Finish("finished"))
    send_files(tracker)
    command = shlex.split(str(address.page(tracker.memory["tracking_uri"], folder, "x")).rpartition(", ")[0])
    assert make_url(command[-1]).database == str(project / "mlflow.db")
    assert len(points(tracker, "train/loss", command[-1])) == 2
    assert list((project / "mlruns").rglob("config.yaml"))
    assert [path.name for path in (folder / "parent").iterdir()] == [name], "MLflow wrote elsewhere"
    assert opened(run, tracker.memory, folder=str(project)).where == tracker.where
    assert str(tracker.where).startswith("mlflow ui, ")


def test_a_database_is_created_in_a_path_with_signs(folder: Path) -> None:
    path = folder / "parent" / "50%25 off?" / "mlflow.db"
    address.connected(address.sqlite_uri(path))
    assert client(address.sqlite_uri(path)).search_experiments()
    assert [file.name for file in (folder / "parent").iterdir()] == ["50%25 off?"]


def test_an_sqlalchemy_that_does_not_decode_addresses_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLAlchemy 2.0 would open another file."""
    monkeypatch.setattr(
        "sqlalchemy.engine.make_url", lambda uri: URL.create("sqlite", database=uri.removeprefix("sqlite:///"))
    )
    address.connected(f"sqlite:///{folder}/mlflow.db")
    with pytest.raises(UnusableError, match=r"pip install 'sqlalchemy>=2\.1'; or choose another place: hooks\.mlflow"):
        address.connected(address.sqlite_uri(folder / "50%.db"))


def test_the_command_that_shows_a_database(tmp_path: Path) -> None:
    def command(uri: str) -> str:
        return str(address.page(uri, tmp_path, "x")).removesuffix(", http://localhost:5000/#/x")

    default = f"sqlite:///{tmp_path}/mlflow.db"
    assert command(default) == "mlflow ui"
    assert command("sqlite:////a/b.db") == "mlflow ui --backend-store-uri sqlite:////a/b.db"
    assert command("sqlite:////a b/x.db") == "mlflow ui --backend-store-uri 'sqlite:////a b/x.db'"
    (tmp_path / "mlruns" / "digits" / "a").mkdir(parents=True)
    assert command(default) == "mlflow ui"
    (tmp_path / "mlruns" / "0").mkdir()
    (tmp_path / "mlruns" / "0" / "meta.yaml").touch()
    assert command(default) == "mlflow ui --backend-store-uri sqlite:///mlflow.db"


def test_a_scheme_that_is_none_is_what_is_said(folder: Path) -> None:
    with pytest.raises(UnusableError, match=r"^MLflow does not know the address 'htp://x'; see hooks"):
        opened(run_in(folder / "run"), tracking_uri="htp://x")


@pytest.mark.parametrize(
    "uri",
    [
        "foo://server",
        "htp:/server",
        "http://no such host",
        "http:///path",
        "http://[::1",
        "http://localhost:99999",
        "./mlruns",
        "file:///tmp/somewhere",
        "sqlite://",
        "sqlite:///:memory:",
        "postgresql://nobody@127.0.0.1:1/x",
    ],
)
def test_an_address_that_is_none(folder: Path, uri: str) -> None:
    with pytest.raises(UnusableError, match=r"hooks\.mlflow\.tracking_uri"):
        opened(run_in(folder / "run"), tracking_uri=uri)


def test_a_place_where_no_database_can_be(folder: Path) -> None:
    (folder / "file").touch()
    (folder / "text.db").write_text("this is no database, whatever its name says" * 10)
    (folder / "folder.db").mkdir()
    (folder / "loop").symlink_to("loop")
    long = "x" * 300
    for name in ("file/mlflow.db", "text.db", "folder.db", "/proc/mlflow.db", "loop/a.db", f"{long}/a.db", long):
        with pytest.raises(UnusableError, match=r"hooks\.mlflow\.tracking_uri"):
            opened(run_in(folder / "run"), tracking_uri=f"sqlite:///{name}")
    with pytest.raises(UnusableError, match=r"^/proc/mlflow\.db: .*; choose another place"):
        opened(run_in(folder / "run"), tracking_uri="sqlite:////proc/mlflow.db")


def test_an_empty_file_becomes_a_database(folder: Path) -> None:
    """`mlflow ui` that has just been started leaves one for a moment."""
    (folder / "new.db").touch()
    tracker = opened(run_in(folder / "run"), tracking_uri="sqlite:///new.db")
    tracker.send(training(0, 1))
    assert len(points(tracker, "train/loss", f"sqlite:///{folder}/new.db")) == 1


def test_a_database_that_is_locked_is_tried_again(folder: Path) -> None:
    with sqlite3.connect(folder / "mlflow.db", isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            opened(run_in(folder / "run"))
        other.execute("ROLLBACK")
    other.close()
    opened(run_in(folder / "run")).send(training(0, 1))


@pytest.mark.slow
def test_a_process_that_was_killed_leaves_no_half_made_database(folder: Path) -> None:
    path = folder / "new.db"
    code = (
        "import os, sqlalchemy.event, sys\n"
        "from sqlalchemy.engine import Engine\n"
        "from hydraloop.tracking.mlflow.address import connected\n"
        "import mlflow\n"
        "def stop(conn, cursor, statement, *_):\n"
        "    if 'alembic_version' in statement and statement.startswith('UPDATE'): os._exit(9)\n"
        "sqlalchemy.event.listen(Engine, 'after_cursor_execute', stop)\n"
        f"connected('sqlite:///{path}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 9, done.stderr
    assert not path.exists()
    address.connected(f"sqlite:///{path}")
    assert client(f"sqlite:///{path}").search_experiments()
    assert not list(folder.glob(".*.part"))


@pytest.mark.parametrize("version", ["6953534de441", "from_the_future"])  # of MLflow 3.1
def test_a_database_of_another_mlflow_is_left_alone(folder: Path, version: str) -> None:
    with sqlite3.connect(folder / "mlflow.db") as database:
        database.execute("UPDATE alembic_version SET version_num = ?", [version])
    database.close()
    before = (folder / "mlflow.db").read_bytes()
    told = r"another MLflow than the installed .* then run `mlflow db upgrade sqlite:.*`; or choose another place"
    with pytest.raises(UnusableError, match=told):
        opened(run_in(folder / "run"))
    assert (folder / "mlflow.db").read_bytes() == before


@pytest.mark.slow
def _send(folder: Path, job: str) -> None:
    run = run_in(folder / job, uid=job)
    try:
        tracker = opened(run, folder=str(folder))
    except BusyError:  # another process has just created the experiment: the follower calls again
        tracker = opened(run, folder=str(folder))
    tracker.send(training(0, 100))
    tracker.finish(Finish("finished"))


@pytest.mark.slow
def test_eight_processes_open_a_database_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_send, args=(tmp_path, str(job))) for job in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 8
    found = client(f"sqlite:///{tmp_path}/mlflow.db")
    (experiment,) = [one for one in found.search_experiments() if one.name == "digits"]
    runs = found.search_runs([experiment.experiment_id])
    assert sorted(run.data.tags["hydraloop.run"] for run in runs) == [str(job) for job in range(8)]
    for run in runs:
        assert run.info.status == "FINISHED"
        assert len(found.get_metric_history(run.info.run_id, "train/loss")) == 100


@pytest.fixture
def disk(tmp_path: Path, empty_database: Path) -> Iterator[Path]:
    """A file system of 16 MB with a database."""
    with small_disk(tmp_path / "small", 16) as folder:
        shutil.copy(empty_database, folder)
        yield folder


@pytest.mark.slow
def test_a_full_disk(tmp_path: Path, disk: Path) -> None:
    tracker = opened(run_in(tmp_path / "run"), folder=str(disk))
    filler = disk / "filler"
    records = training(0, 4000)
    filler.write_bytes(b"x" * (os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize - 8192))
    with pytest.raises(Exception, match="full") as error:
        tracker.send(records)
    assert not isinstance(error.value, UnusableError)
    filler.unlink()
    tracker.send(records)
    uri = f"sqlite:///{disk}/mlflow.db"
    assert len(client(uri).get_metric_history(tracker.memory["run_id"], "train/loss")) == 4000


def test_a_read_only_disk(tmp_path: Path, disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with pytest.raises(UnusableError, match="attempt to write a readonly database; choose another place"):
        opened(run_in(tmp_path / "run"), folder=str(disk))
