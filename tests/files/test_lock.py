"""The lock of a run directory: who holds it, and when it is free."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from hydraloop.errors import UserError
from hydraloop.files import lock
from hydraloop.files.lock import FILENAME, RunLock

HINT = ".lock.json"


def lock_of(folder: Path, *, patience: float = 0.0) -> RunLock:
    return RunLock(folder, key="hydra.run.dir", patience=patience)


def test_it_is_held_and_can_be_taken_again(tmp_path: Path) -> None:
    for _ in range(2):
        with lock_of(tmp_path / "run"):
            with pytest.raises(UserError) as caught:
                lock_of(tmp_path / "run").acquire()
            assert caught.value.key == "hydra.run.dir"
            assert f"process {os.getpid()} on " in str(caught.value)
            assert caught.value.remedy == f"Wait until it has ended, or end it: kill {os.getpid()}."
            found = lock.holder(tmp_path / "run")
            assert found is not None
            assert (found.pid, found.is_here) == (os.getpid(), True)
        assert lock.holder(tmp_path / "run") is None
        assert [path.name for path in (tmp_path / "run").iterdir()] == [FILENAME]


@pytest.mark.parametrize("hint", [None, "", "{", "[]", '{"token": 1}'])
def test_without_the_text_beside_it_it_is_held(hint: str | None, tmp_path: Path) -> None:
    with lock_of(tmp_path):
        (tmp_path / HINT).unlink()
        if hint is not None:
            (tmp_path / HINT).write_text(hint)
        with pytest.raises(UserError, match="another process is training in") as caught:
            lock_of(tmp_path).acquire()
        assert caught.value.remedy == "Wait until it has ended."
        assert lock.holder(tmp_path) == lock.Holder()


def test_a_stop_is_noted_until_the_lock_is_released(tmp_path: Path) -> None:
    for _ in range(2):
        with lock_of(tmp_path):
            assert [lock.note_stop(tmp_path) for _ in range(2)] == [False, True]


def test_looking_writes_nothing_and_refuses_nobody(tmp_path: Path) -> None:
    assert lock.holder(tmp_path / "missing") is None
    assert lock.holder(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    with lock_of(tmp_path):
        pass
    looking = process(tmp_path, "look")
    try:
        assert said(looking) == "looks"
        for _ in range(200):
            with lock_of(tmp_path, patience=lock.PATIENCE):
                pass
    finally:
        looking.kill()
        looking.communicate()


def test_a_reader_without_permission_to_write() -> None:
    """Root may write everywhere, so it becomes another user."""
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as name:  # pytest's folders are of one user
        folder = Path(name)
        folder.chmod(0o755)
        held = lock_of(folder).acquire()
        folder.chmod(0o555)
        try:
            if user == 0:
                os.seteuid(65534)
            assert lock.holder(folder) is not None
        finally:
            os.seteuid(user)
            folder.chmod(0o755)
            held.release()


PROGRAM = """
import os, sys, time
from pathlib import Path
from hydraloop.errors import UserError
from hydraloop.files import lock
from hydraloop.files.lock import RunLock

class Slow:
    def __len__(self):
        return 2
    def __getitem__(self, index):
        (folder / "worker").write_text(str(os.getpid()))
        time.sleep(60)

folder, what = Path(sys.argv[1]), sys.argv[2]
if what == "look":
    print("looks", flush=True)
    while True:
        lock.holder(folder)
    sys.stdin.read()
elif what == "race":  # all at once from here
    import filelock
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        held = RunLock(folder, key="k", patience=0.0).acquire()
    except UserError:
        print("refused", flush=True)
    else:
        print("taken", flush=True)
    sys.stdin.read()
else:
    held = RunLock(folder, key="k").acquire()
    print("taken", flush=True)
    if what == "workers":
        from torch.utils.data import DataLoader
        next(iter(DataLoader(Slow(), num_workers=1, multiprocessing_context="fork")))
    sys.stdin.read()
"""


def process(folder: Path, what: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, str(folder), what]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def said(one: subprocess.Popen[str]) -> str:
    assert one.stdout is not None
    return one.stdout.readline().strip()


def test_of_many_that_start_at_once_one_takes_it(tmp_path: Path) -> None:
    several = [process(tmp_path, "race") for _ in range(3)]
    assert [said(one) for one in several] == ["ready"] * 3
    for one in several:
        assert one.stdin is not None
        one.stdin.write("go\n")
        one.stdin.flush()
    outputs = sorted(map(said, several))
    for one in several:
        one.communicate("")
    assert outputs == ["refused"] * 2 + ["taken"]


def test_the_workers_of_a_killed_run_do_not_hold_it(tmp_path: Path) -> None:
    with process(tmp_path, "workers") as run:
        assert said(run) == "taken"
        file, until = tmp_path / "worker", time.monotonic() + 60
        while not (file.exists() and file.read_text()) and time.monotonic() < until:
            time.sleep(0.05)
        worker = int(file.read_text())
        try:
            run.kill()
            run.wait()
            with lock_of(tmp_path):
                os.kill(worker, 0)  # it lives
        finally:
            os.kill(worker, signal.SIGKILL)


def test_a_folder_that_cannot_be_locked_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be locked: Not a directory") as caught:
        lock_of(tmp_path / "file" / "run").acquire()
    assert caught.value.key == "hydra.run.dir"


def test_a_full_disk_does_not_free_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(lock.atomic, "write_text", full)
    with lock_of(tmp_path):
        assert lock.holder(tmp_path) is not None
    assert lock.holder(tmp_path) is None
