"""Files that a later start depends on are on the disk, and never half written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hydraloop.files import atomic
from hydraloop.files.result import ResultFile
from hydraloop.hooks.checkpoint import CheckpointHook
from tests.hooks.tiny_runs import engine_of

FILES = ("checkpoints/epoch_2.pth", "checkpoints/last_checkpoint", "result.json")


def test_what_a_resumed_run_needs_is_flushed_to_the_disk_with_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    fsync = os.fsync

    def recorded(handle: int) -> None:
        flushed.append(os.fstat(handle).st_ino)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", recorded)
    engine_of(tmp_path, {"checkpoint": CheckpointHook()}, max_epochs=2).train()
    for path in (tmp_path / name for name in FILES):
        file, folder = path.stat().st_ino, path.parent.stat().st_ino
        assert file in flushed, f"{path.name} may be empty after a power failure"
        assert folder in flushed[flushed.index(file) :], f"{path.name} may be gone after a power failure"


KILLED = """
import os, signal, sys
from pathlib import Path
from hydraloop.files import atomic

atomic.write_text(Path(sys.argv[1]), "old\\n")
os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
atomic.write_text(Path(sys.argv[1]), "new\\n" * 100_000)
"""


def test_a_process_that_is_killed_while_it_writes_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert path.read_text() == "old\n"
    assert len([*tmp_path.iterdir()]) == 2
    ResultFile(tmp_path)  # as the next attempt does
    assert [*tmp_path.iterdir()] == [path]


def fail(path: Path) -> None:
    with atomic.replacing(path) as unfinished:
        unfinished.write_text("ne")
        raise ValueError("in the middle")


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    atomic.write_text(path, "old")
    with pytest.raises(ValueError, match="in the middle"):
        fail(path)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]
