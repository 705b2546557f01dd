"""A run may come from someone else: links in it lead to files that are neither sent nor written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hydraloop.commands import sync
from hydraloop.files.metrics_log import FILENAME
from hydraloop.files.result import Result
from hydraloop.tracking.cursor import Cursor
from hydraloop.tracking.tracker import MLFLOW, RefusedError, own
from tests.tracking.mlflow.runs import QUIET, client, empty_database, folder
from tests.tracking.runs import TENSORBOARD, attempt, described_run, log_records, track

__all__ = ["empty_database", "folder"]
pytestmark = QUIET
SECRET = "TOPSECRET-4711"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file of the user, outside of the run."""
    path = tmp_path / "home" / "id_rsa"
    path.parent.mkdir()
    path.write_text(SECRET)
    return path


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_link_is_no_file_of_the_run(tmp_path: Path, secret: Path, link: Callable[[Path, Path], None]) -> None:
    run_dir = tmp_path / "run"
    (run_dir / "media").mkdir(parents=True)
    (run_dir / "media" / "mine").write_text("mine")
    assert own(run_dir, run_dir / "media" / "mine").read_text() == "mine"
    link(secret, run_dir / "media" / "theirs")
    (run_dir / "folder").symlink_to(secret.parent)
    for path in ("media/theirs", "folder/id_rsa", "../home/id_rsa", "media"):
        with pytest.raises(RefusedError):
            own(run_dir, run_dir / path)


def foreign(run_dir: Path, secret: Path) -> Path:
    """A run with records, whose files are links to the file of the user."""
    checkpoints = {"default_hooks.checkpoint.out_dir": str(secret.parent)}
    described_run(run_dir, replace(attempt(**checkpoints), patch="code.patch"))
    log_records(run_dir, 3)
    (run_dir / "media").mkdir()
    for name in ("media/a.txt", "media/b.txt", "code.patch"):
        (run_dir / name).symlink_to(secret)
    (run_dir / "media" / "b.txt").unlink()
    os.link(secret, run_dir / "media" / "b.txt")
    secret.with_name("a.pth").write_text(SECRET)
    with (run_dir / FILENAME).open("a") as file:
        for name in ("a", "b"):
            shown = [{"kind": "text", "name": name, "path": f"media/{name}.txt"}]
            file.write(json.dumps({"mode": "val", "epoch": 1, "iteration": 40, "objects": shown}) + "\n")
    Result("finished").write(run_dir)
    return run_dir


def everything_below(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def test_mlflow_and_tensorboard_get_no_file_that_a_link_points_to(
    folder: Path, secret: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = foreign(folder / "run", secret)
    options = {"system_metrics": False, "folder": str(folder), "log_code": True, "checkpoints": "all"}
    track(run_dir, "mlflow", MLFLOW, options)
    track(run_dir, "tensorboard", TENSORBOARD)
    assert sync.send_all([run_dir]) == 0
    cursor = Cursor.load(run_dir, "mlflow")
    assert cursor is not None
    assert (cursor.sent, cursor.complete) == (5, True)
    assert [one.path for one in client().list_artifacts(cursor.memory["run_id"])] == ["config.yaml", "result.json"]
    assert SECRET.encode() not in everything_below(folder / "mlruns") + everything_below(run_dir / "tensorboard")
    assert "is a link, or no file" in caplog.text


def test_a_record_log_that_is_a_link_is_not_sent(folder: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    described_run(run_dir)
    log_records(tmp_path, 3)
    (run_dir / FILENAME).symlink_to(tmp_path / FILENAME)
    track(run_dir, "tensorboard", TENSORBOARD)
    assert sync.send_all([run_dir]) == 1
    cursor = Cursor.load(run_dir, "tensorboard")
    assert cursor is not None
    assert cursor.sent == 0


def test_tensorboard_writes_through_no_link(tmp_path: Path, secret: Path) -> None:
    run_dir = tmp_path / "run"
    described_run(run_dir)
    log_records(run_dir, 3)
    track(run_dir, "tensorboard", TENSORBOARD)
    (run_dir / "tensorboard").symlink_to(secret.parent)
    assert sync.send_all([run_dir]) == 1
    assert [path.name for path in secret.parent.iterdir()] == ["id_rsa"]
