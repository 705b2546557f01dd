"""WandbLoggerHook: errors, the options of its follower, and a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hydraloop.engine.engine import Engine
from hydraloop.errors import UserError
from hydraloop.hooks import LoggerHook, WandbLoggerHook
from hydraloop.tracking.cursor import Cursor
from tests.helpers import batches, make_engine
from tests.scripts import REPOSITORY


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"checkpoints": "some"}, "checkpoints"),
        ({"flush_timeout": -1.0}, "flush_timeout"),
    ],
)
def test_a_mistake_names_its_option(options: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError) as caught:
        WandbLoggerHook(**options)
    assert caught.value.key == key
    assert caught.value.remedy


def test_a_second_one_is_refused(tmp_path: Path) -> None:
    """It would make the same W&B run."""
    engine = make_engine(
        tmp_path,
        {"logger": LoggerHook(), "wandb": WandbLoggerHook(), "more": WandbLoggerHook()},
        train=batches(1),
    )
    with pytest.raises(UserError, match="wandb and more"):
        engine.hooks["wandb"].before_run(engine)


@pytest.fixture
def _nobodys_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the machine's API key and mode."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


def _engine(run_dir: Path, hook: WandbLoggerHook, **options: Any) -> Engine:
    hooks = {"logger": LoggerHook(interval=1), "wandb": hook}
    return make_engine(run_dir, hooks, train=batches(4), val=batches(1), max_epochs=2, **options)


def _steps(run_dir: Path) -> str:
    """Steps of the rows in its offline file, read in another process, which imports W&B's library."""
    (file,) = run_dir.glob("wandb/offline-run-*/*.wandb")
    reading = (
        "import sys, pathlib; from tests.tracking.wandb.file import steps; print(steps(pathlib.Path(sys.argv[1])))"
    )
    found = subprocess.run(
        [sys.executable, "-c", reading, str(file)],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return found.stdout.strip()


@pytest.mark.usefixtures("_nobodys_settings")
def test_a_run_is_in_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real follower and library. The option replaces the variable; secrets in names are masked."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    init = {"mode": "offline", "notes": "password=hunter2hunter2", "group": "token=zzzzzzzzzz"}
    _engine(tmp_path, WandbLoggerHook(init=init, flush_timeout=60.0)).train()
    cursor = Cursor.load(tmp_path, "wandb")
    assert cursor is not None
    assert (cursor.sent, cursor.complete) == (10, True)
    assert str(cursor.where).startswith(f"wandb sync {tmp_path}/wandb/offline-run-")
    assert _steps(tmp_path) == str(list(range(10)))
    files = [*(tmp_path / "wandb").rglob("*"), *(tmp_path / "tracking").rglob("*")]  # `code.patch` has this test
    written = b"".join(path.read_bytes() for path in files if path.is_file())
    assert b"password=***" in written
    assert not [secret for secret in (b"hunter2hunter2", b"zzzzzzzzzz") if secret in written]
