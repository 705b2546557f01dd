"""`sync.py` with many runs: a broken one does not affect the others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from hydraloop.commands import sync
from hydraloop.commands.command_line import view as command
from hydraloop.files.lock import RunLock
from hydraloop.files.result import Result
from hydraloop.files.secrets import masked
from hydraloop.safety.allowlist import ALLOWLIST
from hydraloop.tracking import run_description
from hydraloop.tracking.cursor import Cursor, sync_command
from tests.marks import nightly, slow
from tests.tracking.runs import TENSORBOARD, attempt, described_run, log_records, track
from tests.tracking.service import Service


def _run(run_dir: Path, *, options: Mapping[str, object] = {}, **changes: object) -> Path:
    described_run(run_dir, replace(attempt(), **changes))  # type: ignore[arg-type]
    log_records(run_dir, 3)
    track(run_dir, "tensorboard", TENSORBOARD, {"interval": 1, **options})
    return run_dir


@pytest.mark.parametrize("broken", ["run.json", "attempt_0.json"])
@pytest.mark.parametrize("content", ["", "[1]", "{}"])
def test_a_broken_file_is_one_runs_trouble(
    tmp_path: Path, broken: str, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "abc":
        Result("finished").write(_run(tmp_path / name))
    (tmp_path / "a" / "tracking" / broken).write_text(content)
    code = sync.send_all([tmp_path])
    shown = capsys.readouterr().out
    for name in "bc":
        cursor = Cursor.load(tmp_path / name, "tensorboard")
        assert cursor is not None
        assert (cursor.sent, cursor.complete) == (3, True)
    assert code == 1
    assert "not all: " in shown.splitlines()[0]


def test_whether_the_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _run(tmp_path / "on")
    _run(tmp_path / "over")
    with RunLock(tmp_path / "on", key="test"):
        assert sync.send_all([tmp_path]) == 1
    on, over = capsys.readouterr().out.splitlines()
    assert on.endswith("3 of 3 records there; not all: the run is still training")
    assert "over  tensorboard: 3 sent, 3 of 3 records there, " in over
    run = run_description.read(tmp_path / "over")
    assert run is not None
    assert run_description.ending(tmp_path / "over", run.attempt).status == "killed"


def test_lines_that_a_file_server_does_not_show_yet_are_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = _run(tmp_path / "a")
    Result("finished", records=5).write(run_dir)
    assert sync.send_all([tmp_path]) == 1
    assert "3 of 3 records there; not all: " in capsys.readouterr().out
    cursor = Cursor.load(run_dir, "tensorboard")
    assert cursor is not None
    assert not cursor.complete
    log_records(run_dir, 2, first=3)
    assert sync.send_all([tmp_path]) == 0
    cursor = Cursor.load(run_dir, "tensorboard")
    assert cursor is not None
    assert (cursor.sent, cursor.complete) == (5, True)


def test_what_is_typed_masks_all_it_says(tmp_path: Path) -> None:
    run_dir = _run(tmp_path / "a")
    track(run_dir, "tensorboard", "http://me:s3cretPassw0rd@host")
    done = subprocess.run(
        [sys.executable, "-m", "hydraloop", "sync", str(run_dir)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "the tracker 'http://me:***@host'" in done.stdout
    assert "s3cretPassw0rd" not in done.stdout + done.stderr


_EVIL = """
from pathlib import Path
from hydraloop.tracking.tensorboard import TensorBoardTracker

Path(__file__).with_name("executed").touch()

class Evil(TensorBoardTracker): pass
"""


@pytest.mark.parametrize("inside", [".", slow("a"), nightly("a/tracking")])
def test_no_class_is_taken_from_the_working_directory(tmp_path: Path, inside: str) -> None:
    """A cursor names a file that came with the run. The command is started in its directory, or in that of the run."""
    run_dir = _run(tmp_path / "a")
    here = tmp_path / inside
    (here / "evil.py").write_text(_EVIL)
    track(run_dir, "tensorboard", "evil.Evil")
    command = [sys.executable, "-m", "hydraloop", "sync"]
    done = subprocess.run([*command, str(run_dir)], cwd=here, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "the tracker 'evil.Evil' cannot be loaded" in done.stdout
    assert "the project's script sends it: python train.py sync <folder>" in done.stdout
    assert not (here / "executed").exists()
    track(run_dir, "tensorboard", TENSORBOARD)
    assert subprocess.run([*command, str(run_dir)], cwd=here, check=False).returncode == 0


def test_a_custom_tracker_gets_no_masked_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ALLOWLIST, "_trusted", {"tests"})
    service, run_dir = Service(), _run(tmp_path / "a")
    with service.up():
        track(run_dir, "mine", "tests.tracking.service.Posting", masked({"port": service.port, "token": "x"}))
        assert command(["sync", str(run_dir)]) == 1
    shown = capsys.readouterr().out
    assert "hooks.mine.token is a secret, which is not stored: let the tracker read it from the environment" in shown
    assert service.requests == 0


def test_the_printed_command_for_a_custom_tracker_is_that_of_the_script() -> None:
    assert sync_command(Path("outputs/a"), TENSORBOARD) == "hydraloop sync outputs/a"
    assert sync_command(Path("outputs/a"), "my_project.webhook.WebhookTracker") == "python train.py sync outputs/a"
