"""Real faults of real services: a slow and a busy server, a lost database, a stopped follower, a full disk."""

from __future__ import annotations

import random
import re
import shlex
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.e2e.projects import REPOSITORY, Done, Project, Run
from tests.e2e.trackers.fault_hooks import HOOKS, LONG, PICTURES, UNTIL
from tests.e2e.trackers.http_proxy import http_proxy
from tests.e2e.trackers.tracked import MLflowRun, mlflow_run, mlflow_runs, points
from tests.processes import until
from tests.small_disk import small_disk
from tests.tracking.mlflow.server import MLflowServer, mlflow_server

SOON = 120.0
"""Seconds within which anything that is waited for happens, on a busy machine."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MLflowServer]:
    with mlflow_server(tmp_path_factory.mktemp("server")) as started:
        yield started


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project.make(tmp_path / "project")
    made.write("my_project/faults.py", HOOKS)
    return made


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    with small_disk(tmp_path / "disk", 2) as folder:
        yield folder


def summary(done: Done) -> str:
    """MLflow's line at the end of the run."""
    (line,) = re.findall(r"^mlflow +(\S.*)$", done.out, re.M)
    return str(line)


def sync(project: Project, *options: str, **environment: str) -> Done:
    return project.python("-m", "hydraloop", "sync", str(project.run.path), *options, **environment)


def pictures(found: MLflowRun, server: MLflowServer) -> Counter[str]:
    """How often each picture is stored, by its name and step."""
    folders = [path for path in (server.folder / "artifacts").rglob("images") if found.uid in path.parts]
    names = [path.name for folder in folders for path in folder.iterdir() if "compressed" not in path.name]
    return Counter("+".join(re.split(r"[+%]", name)[:3]) for name in names)


def assert_whole(found: MLflowRun, run: Run) -> None:
    """Each record arrived once, and the status says how the run ended."""
    assert found.status == "FINISHED"
    assert found.recorded == points(run)


@contextmanager
def training(project: Project, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A training that has records in `mlflow.db`, until there is a file `stop`. It is killed at the end if it runs."""
    process = project.start("hooks=[mlflow]", *LONG, *UNTIL, *options)
    try:
        until(lambda: (project.path / "mlflow.db").exists(), "the database is there")
        until(lambda: any(run.points for run in mlflow_runs(project.path)), "records have arrived")
        yield process
    finally:
        process.kill()
        process.communicate()


# A server that is slow or busy. --------------------------------------------------------------------------------------


@pytest.mark.nightly  # a server
def test_a_slow_server_has_metrics_and_status_before_the_pictures(project: Project, server: MLflowServer) -> None:
    with http_proxy(server.port) as proxy:
        proxy.delay = 0.3
        uri = f"hooks.mlflow.tracking_uri={proxy.uri}"
        timeout = "hooks.mlflow.flush_timeout=20"
        done = project.train("hooks=[mlflow]", uri, *LONG, *PICTURES, "engine.max_epochs=15", timeout)
        assert done.code == 0, done.text
        run, count = project.run, len(project.run.records)
        assert count > 400
        assert f"{count} of {count} records sent" in summary(done)
        (found,) = (one for one in mlflow_runs(server.folder) if one.tags["run_dir"] == str(run.path))
        assert_whole(found, run)
        at_end = pictures(found, server)
        assert len(at_end) < 100, "the pictures are not awaited"
        assert "sync" in summary(done)

        proxy.delay = 0.0
        synced = sync(project)
        assert synced.code == 0, synced.text
    (found,) = (one for one in mlflow_runs(server.folder) if one.tags["run_dir"] == str(run.path))
    assert_whole(found, run)
    assert pictures(found, server) == dict.fromkeys(pictures(found, server), 1)
    assert len(pictures(found, server)) == 100


@pytest.mark.nightly  # a minute
def test_a_server_that_refuses_a_third_of_the_requests_gets_everything_once(
    project: Project, server: MLflowServer
) -> None:
    dice = random.Random(7)
    answers = [(429, {"Retry-After": "1"}), (429, {}), (500, {}), (503, {})]
    with http_proxy(server.port) as proxy:
        proxy.refuse = lambda number: dice.choice(answers) if dice.random() < 1 / 3 else None
        uri = f"hooks.mlflow.tracking_uri={proxy.uri}"
        done = project.train(
            "hooks=[mlflow]", uri, *LONG, PICTURES[0], "+hooks.pictures.number=40", "engine.max_epochs=15"
        )
        assert done.code == 0, done.text
        calls = 1
        while (last := sync(project)).code != 0:
            calls += 1
            assert calls <= 3, last.text
        refused = Counter(status for *_, status in proxy.answered)
    assert sum(refused[status] for status in (429, 500, 503)) > len(proxy.answered) / 5
    run = project.run
    (found,) = (one for one in mlflow_runs(server.folder) if one.tags["run_dir"] == str(run.path))
    assert_whole(found, run)
    assert len(pictures(found, server)) == 40
    assert set(pictures(found, server).values()) == {1}


# A database that is lost, a follower that hangs. ---------------------------------------------------------------------


@pytest.mark.nightly
def test_a_database_that_is_deleted_is_reported_with_a_command_that_sends_everything_again(project: Project) -> None:
    with training(project) as process:
        for path in project.path.glob("mlflow.db*"):
            path.unlink()
        until(lambda: "WARNING" in project.run.log, "it is reported")
        project.write("stop", "")
        output, _ = process.communicate(timeout=SOON)
    assert process.returncode == 0, output
    run = project.run
    (command,) = set(re.findall(r"`(rm [^`]+)`", output))
    assert len(re.findall(r"^warning: mlflow: ", output, re.M)) == 1, output
    remove, sync = (shlex.split(part) for part in command.split(" && "))
    (project.path / remove[1]).unlink()
    done = project.python("-m", *sync)
    assert done.code == 0, done.text
    assert_whole(mlflow_run(project.path), run)


@pytest.mark.nightly
def test_a_follower_that_is_stopped_does_not_delay_the_run(project: Project) -> None:
    with training(project, "hooks.mlflow.flush_timeout=3") as process:
        children = psutil.Process(process.pid).children(recursive=True)
        (follower,) = (one for one in children if "sync --follow" in " ".join(one.cmdline()))
        follower.send_signal(signal.SIGSTOP)
        project.write("stop", "")
        run = project.run
        until(lambda: (run.path / "result.json").exists(), "training ends")
        ended = time.monotonic()
        output, _ = process.communicate(timeout=SOON)
        took = time.monotonic() - ended
    assert process.returncode == 0, output
    assert took < 3 + 5, "flush_timeout, and some seconds to exit"
    assert not follower.is_running()
    assert "sends the rest" in output
    done = sync(project)
    assert done.code == 0, done.text
    assert_whole(mlflow_run(project.path), run)


# A disk that is full. ------------------------------------------------------------------------------------------------


def on_a_full_disk(project: Project, disk: Path, *, full: int, free: int, flush_timeout: int) -> Done:
    """Train 300 iterations with a run directory on a disk that is full between two of them."""
    filling = ["+hooks.disk._target_=my_project.faults.Disk", f"+hooks.disk.file={disk / 'filler'}"]
    filling += [f"+hooks.disk.full={full}", f"+hooks.disk.free={free}", "+hooks.pictures.on_error=warn"]
    usual = [
        *LONG,
        "engine.max_epochs=15",
        f"hooks.mlflow.flush_timeout={flush_timeout}",
        f"hydra.run.dir={disk / 'run'}",
    ]
    return project.train("hooks=[mlflow]", *usual, *PICTURES, *filling)


def lines_about(done: Done) -> list[str]:
    """What was printed except for the records and the texts at the begin and the end of the run."""
    table = re.compile(r"(train|val|test) +\d+/\d+ ")
    _, *after = re.split(r"^ +epoch +iter .*$", done.text, maxsplit=1, flags=re.M)
    return [line for line in after[0].splitlines() if not table.match(line)]


@pytest.mark.slow
def test_a_disk_that_is_full_for_a_while_loses_no_record(project: Project, disk: Path) -> None:
    done = on_a_full_disk(project, disk, full=20, free=200, flush_timeout=60)
    assert done.code == 0, done.text
    run = Run(disk / "run")
    train = [record["iteration"] for record in run.records if record["mode"] == "train" and "loss" in record]
    assert train == [*range(1, 301)], "each once, in order"
    assert_whole(mlflow_run(project.path), run)
    assert done.text.count("metrics.jsonl cannot be written: [Errno 28] No space left on device") == 1
    assert done.text.count("train.log cannot be written") == 1
    assert done.text.count("hook pictures failed at") == 1
    assert "lacks" not in done.text
    assert len(lines_about(done)) < 80, done.text


@pytest.mark.nightly
def test_a_disk_that_stays_full_is_reported_and_sync_sends_what_was_written(project: Project, disk: Path) -> None:
    done = on_a_full_disk(project, disk, full=100, free=1000, flush_timeout=3)
    assert done.code == 1
    assert re.search(r"metrics.jsonl lacks the last \d+ records: ", done.text)
    assert "result.json cannot be written" in done.text
    assert done.text.count("Traceback") <= 3
    assert len(lines_about(done)) < 150, done.text
    (disk / "filler").unlink()
    run = Run(disk / "run")
    assert len(run.records) > 90, "all lines are whole"
    synced = project.python("-m", "hydraloop", "sync", str(run.path))
    assert synced.code == 0, synced.text
    found = mlflow_run(project.path)
    assert found.recorded == points(run)


# A library that cannot be imported. ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_broken_library_is_one_warning_or_ends_the_run_before_training(project: Project, tmp_path: Path) -> None:
    broken = tmp_path / "broken" / "mlflow"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text('raise ImportError("libmlflow.so.1: cannot open shared object file")\n')
    path, problem = f"{REPOSITORY}:{broken.parent}", "ImportError: libmlflow.so.1: cannot open shared object file"
    command = ["train.py", "hooks=[mlflow]", "engine.max_epochs=1"]
    done = project.python(*command, PYTHONPATH=path)
    assert done.code == 0, done.text
    assert len(re.findall(rf"^warning: mlflow: {problem}", done.text, re.M)) == 1, done.text
    run = project.run
    synced = sync(project)
    assert synced.code == 0, synced.text
    assert_whole(mlflow_run(project.path), run)

    done = project.python(*command, "hooks.mlflow.on_error=raise", PYTHONPATH=path)
    assert done.code == 1
    assert f"error: hooks.mlflow: {problem}\n  Fix it, or " in done.text
    assert not re.search("^train +1/1", done.text, re.M), "it is reported before training"
