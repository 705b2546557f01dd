"""The custom tracker of docs/how-to/tracking.md: an outage of its service, files, and sync."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hydraloop.files.metrics_log import FILENAME, read_all
from hydraloop.files.result import Result
from tests.docs.pages import blocks
from tests.e2e.projects import REPOSITORY, Project
from tests.tracking.runs import described_run, log_records, track
from tests.tracking.service import OK, Service

PAGE = REPOSITORY / "docs" / "how-to" / "tracking.md"
FILES = (Path(__file__).parent / "posts_files.py").read_text(encoding="utf-8")
KIND = "my_project.posts.PostsTracker"
SLOW = """
import time
from hydraloop import Hook

class Slow(Hook):
    def after_train_iter(self, engine, batch_idx, batch, outputs):
        time.sleep(0.1)
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A project with the files of the page, and with a tracker that also sends files."""
    made = Project.make(tmp_path / "project")
    for block in blocks(PAGE):
        if block.file is not None:
            made.write(block.file, block.text)
    made.write("my_project/posts_files.py", FILES)
    return made


def posts(service: Service, kind: str = "posts.Posts") -> list[str]:
    """The overrides that select the hook."""
    return [f"+hooks.posts._target_=my_project.{kind}", f"+hooks.posts.url={service.url}"]


def records(service: Service) -> list[dict[str, Any]]:
    """The records that the service has, in the order of their arrival."""
    return [record for body in service.bodies("/") for record in body.get("records", [])]


def events(service: Service) -> list[str]:
    return [body["event"] for body in service.bodies("/")]


def sync(project: Project, *arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, project.path / "train.py", "sync", *arguments],
        cwd=folder or project.path, env={"PYTHONPATH": str(REPOSITORY), "PATH": "/bin"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_an_outage_in_the_middle_of_a_run_loses_and_repeats_nothing(project: Project) -> None:
    project.write("my_project/slow.py", SLOW)
    service = Service(lambda number: (503, {}) if number == 1 else OK)
    down = threading.Event()

    def outage() -> None:
        with service.up():
            while len(records(service)) < 8 and not ended.is_set():
                time.sleep(0.01)
        down.set()
        time.sleep(2.5)
        with service.up():
            ended.wait(60)

    with service.up():
        pass  # the port is known
    ended = threading.Event()
    thread = threading.Thread(target=outage)
    thread.start()
    try:
        done = project.train(
            *posts(service), "+hooks.posts.flush_timeout=30", "+hooks.slow._target_=my_project.slow.Slow",
            "engine.max_iters=60", "default_hooks.logger.interval=1", "engine.val_interval=20",
        )  # fmt: skip
    finally:
        ended.set()
        thread.join()
    assert done.code == 0, done.text
    assert down.is_set(), "the service was down during the run"
    expected = list(read_all(project.run.path / FILENAME))
    assert [(one["id"], one["step"]) for one in records(service)] == [(one.index, one.iteration) for one in expected]
    assert {name: records(service)[0][name] for name in expected[0].metrics} == expected[0].metrics
    assert events(service) == ["begin", *["records"] * (len(events(service)) - 2), "end"]
    (warning,) = [line for line in done.text.splitlines() if "training continues" in line]
    assert warning.startswith("warning: posts: ")
    assert f"{len(expected)} of {len(expected)} records sent" in done.text


@pytest.mark.slow
def test_files_arrive_once_and_after_the_status(project: Project) -> None:
    service = Service()
    with service.up():
        done = project.train(
            "hooks=visualization", *posts(service, "posts_files.PostsWithFiles"), "engine.max_epochs=1"
        )
    assert done.code == 0, done.text
    names = [body["name"] for body in service.bodies("/") if body["event"] == "file"]
    assert names == ["val/predictions", "test/predictions"]


def _recorded(project: Project, **options: Any) -> Path:
    """A finished run of three records, of which the service has none."""
    run_dir = project.path / "outputs" / "run"
    described_run(run_dir)
    log_records(run_dir, 3)
    Result("finished").write(run_dir)
    track(run_dir, "posts", KIND, options)
    return run_dir


@pytest.mark.slow
def test_sync_sends_the_rest_once(project: Project) -> None:
    service = Service()
    with service.up():
        _recorded(project, url=service.url)
        done = sync(project, "outputs")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("outputs/run  posts: 3 sent, 3 of 3 records there")
        repeated = sync(project, "outputs")
    assert repeated.returncode == 0
    assert repeated.stdout.startswith("outputs/run  posts: 0 sent")
    assert events(service) == ["begin", "records", "end", "begin"]
    assert [record["id"] for record in records(service)] == [0, 1, 2]
