"""Addresses of MLflow, the commands that show them, and databases that several processes open."""

from __future__ import annotations

import multiprocessing
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy.engine import make_url

from hydraloop.tracking import mlflow_runs
from hydraloop.tracking.tracker import BusyError, Finish, UnusableError
from tests.small_disk import small_disk
from tests.tracking.mlflow.runs import QUIET, client, empty_database, folder, opened, points, run_in, training

__all__ = ["empty_database", "folder"]
pytestmark = QUIET


@pytest.mark.parametrize(
    ("option", "then", "known", "now", "expected"),
    [
        (None, None, None, None, "sqlite:////here/mlflow.db"),
        (None, None, None, "http://me:pass@server:5000", "http://me:pass@server:5000"),
        ("http://new", "http://was", "http://was", "http://now", "http://new"),
        ("http://me:***@server:5000", None, None, "http://me:pass@server:5000", "http://me:pass@server:5000"),
        ("http://me:***@server:5000/", None, None, "http://other", "http://server:5000"),
        ("http://me:pass@server", None, None, "http://me:other@server", "http://me:pass@server"),
        ("sqlite:///a/b.db", None, None, None, "sqlite:////here/a/b.db"),
        ("sqlite:////a/b.db", None, None, None, "sqlite:////a/b.db"),
        # `sync` in another shell: the variable can be put right, until the run exists at the server of its own.
        (None, "http://then", None, None, "http://then"),
        (None, "http://wrong", None, "http://right", "http://right"),
        (None, "http://then", "http://then", "http://now", "http://then"),
        (None, None, "sqlite:////here/mlflow.db", "http://now", "sqlite:////here/mlflow.db"),
        # A cursor, which may come from someone else, names no address of its own.
        (None, None, "http://elsewhere", None, "sqlite:////here/mlflow.db"),
        (None, "http://then", "http://elsewhere", None, "http://then"),
    ],
)
def test_which_address_is_meant(
    option: str | None,
    then: str | None,
    known: str | None,
    now: str | None,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    if now is not None:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", now)
    options = {"folder": "/here", "tracking_uri": option, "environment": then}
    assert mlflow_runs.address_of(options, known) == expected


def test_signs_in_the_path_of_a_project(folder: Path, empty_database: Path) -> None:
    name = "it's [1]+{2}@x:8 #\u00e4"
    project = folder / "parent" / name
    run = run_in(project / "outputs" / name)
    shutil.copy(empty_database, project)
    tracker = opened(run, folder=str(project))
    tracker.send(training(0, 2))
    tracker.finish(Finish("finished"))
    while tracker.send_file():
        pass
    command = shlex.split(str(mlflow_runs.page(tracker.memory["tracking_uri"], "x")).split("`")[1])
    assert make_url(command[-1]).database == str(project / "mlflow.db")
    assert len(points(tracker, "train/loss", command[-1])) == 2
    assert list((project / "mlruns").rglob("config.yaml"))
    assert [path.name for path in (folder / "parent").iterdir()] == [name], "MLflow wrote elsewhere"


def test_the_command_that_shows_a_database(folder: Path) -> None:
    def command(uri: str) -> str:
        return str(mlflow_runs.page(uri, "x")).removesuffix(" and open http://localhost:5000/#/x")

    assert command(f"sqlite:///{folder}/mlflow.db") == "run `mlflow ui`"
    assert command("sqlite:////a b/x.db") == "run `mlflow ui --backend-store-uri 'sqlite:////a b/x.db'`"


@pytest.mark.parametrize(
    "uri",
    [
        "foo://server",
        "http://[::1",
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite:///a.db?timeout=5",
        "sqlite:///50%25.db",
        "sqlite:////proc/mlflow.db",
        "sqlite:///file/mlflow.db",
    ],
)
def test_an_address_that_cannot_be_used(folder: Path, uri: str) -> None:
    (folder / "file").touch()
    with pytest.raises(UnusableError, match=r"hooks\.mlflow\.tracking_uri"):
        opened(run_in(folder / "run"), tracking_uri=uri)


@pytest.mark.slow
def test_a_process_that_was_killed_leaves_no_half_made_database(folder: Path) -> None:
    path = folder / "new.db"
    code = (
        "import os, sqlalchemy.event, sys\n"
        "from sqlalchemy.engine import Engine\n"
        "from hydraloop.tracking.mlflow_runs import connected\n"
        "import mlflow\n"
        "def stop(conn, cursor, statement, *_):\n"
        "    if 'alembic_version' in statement and statement.startswith('UPDATE'): os._exit(9)\n"
        "sqlalchemy.event.listen(Engine, 'after_cursor_execute', stop)\n"
        f"connected('sqlite:///{path}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 9, done.stderr
    assert not path.exists()
    mlflow_runs.connected(f"sqlite:///{path}")
    assert client(f"sqlite:///{path}").search_experiments()
    assert not list(folder.glob(".*.part"))


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
