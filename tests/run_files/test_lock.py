"""The lock of a run directory: who holds it, on this machine and on another, and when it is free."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from hydraloop.errors import UserError
from hydraloop.run_files import lock
from hydraloop.run_files.lock import FILENAME, RunLock
from hydraloop.run_files.processes import is_alive, started


def lock_of(folder: Path, *, wait: bool = False) -> RunLock:
    return RunLock(folder, key="hydra.run.dir", wait=wait)


def written_by(folder: Path, *, age: float, **changed: object) -> Path:
    """A lock that another process has taken, and renewed that many seconds ago."""
    with lock_of(folder):
        content = json.loads((folder / FILENAME).read_text())
    path = folder / FILENAME
    path.write_text(json.dumps({**content, **changed}))
    os.utime(path, (time.time() - age, time.time() - age))
    return path


def elsewhere(folder: Path, *, age: float) -> Path:
    return written_by(folder, age=age, host="node7", machine="node7 boot", processes=[[4711, 1.0]])


def test_it_is_there_while_it_is_held_and_can_be_taken_again(tmp_path: Path) -> None:
    for _ in range(2):
        with lock_of(tmp_path / "run"):
            assert [path.name for path in (tmp_path / "run").iterdir()] == [FILENAME]
            assert "hydraloop-lock" in [thread.name for thread in threading.enumerate()]
            with pytest.raises(UserError) as caught:
                lock_of(tmp_path / "run").acquire()
            assert caught.value.key == "hydra.run.dir"
            assert f"process {os.getpid()} on " in str(caught.value)
            assert caught.value.remedy == f"Wait until it has ended, or end it: kill {os.getpid()}."
        assert list((tmp_path / "run").iterdir()) == []
        assert "hydraloop-lock" not in [thread.name for thread in threading.enumerate()]


def test_it_is_free_when_its_process_is_gone_or_its_id_is_another_processs(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for processes in ([[gone.pid, started(os.getpid())]], [[os.getpid(), 1.0]], []):
        written_by(tmp_path, age=0, processes=processes)
        with lock_of(tmp_path):
            pass


def test_a_process_that_was_not_waited_for_is_not_alive(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    since = started(child.pid)
    assert is_alive(child.pid, since)
    child.kill()
    deadline = time.monotonic() + 60
    while is_alive(child.pid, since) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(child.pid, since), "a zombie"
    child.communicate()


def test_a_copy_of_a_directory_in_which_a_run_is_training_is_free(tmp_path: Path) -> None:
    with lock_of(tmp_path / "run"):
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        with lock_of(tmp_path / "copy"):
            pass
        (tmp_path / "link").symlink_to(tmp_path / "run")
        with pytest.raises(UserError, match="is training in"):
            lock_of(tmp_path / "link").acquire()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"token": 1}'])
def test_a_file_that_was_cut_off_is_free(content: str, tmp_path: Path) -> None:
    (tmp_path / FILENAME).write_text(content)
    with lock_of(tmp_path):
        pass


def test_from_another_machine_it_is_held_until_it_is_a_minute_old(tmp_path: Path) -> None:
    path = elsewhere(tmp_path, age=50)
    before = path.read_bytes(), path.stat().st_mtime_ns
    with pytest.raises(UserError, match=r"process 4711 on node7 is training in") as caught:
        lock_of(tmp_path).acquire()
    assert "kill" not in str(caught.value.remedy)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    assert [entry.name for entry in tmp_path.iterdir()] == [FILENAME]
    elsewhere(tmp_path / "old", age=61)
    with lock_of(tmp_path / "old"):
        pass


@pytest.mark.slow
def test_one_that_waits_gets_it_when_it_is_a_minute_old(tmp_path: Path) -> None:
    elsewhere(tmp_path, age=58)
    begin = time.monotonic()
    with lock_of(tmp_path, wait=True):
        assert time.monotonic() - begin > 1


def test_one_that_waits_gives_up_if_it_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "HELD", 0.5)
    monkeypatch.setattr(lock, "_MARGIN", 0.5)
    path = elsewhere(tmp_path, age=0)
    done = threading.Event()

    def renew() -> None:
        while not done.wait(0.05):
            os.utime(path)

    renewing = threading.Thread(target=renew)
    renewing.start()
    try:
        with pytest.raises(UserError, match="node7"):
            lock_of(tmp_path, wait=True).acquire()
    finally:
        done.set()
        renewing.join()


def test_it_is_renewed_while_it_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT", 0.05)
    with lock_of(tmp_path):
        path = tmp_path / FILENAME
        os.utime(path, (1, 1))
        deadline = time.monotonic() + 60
        while path.stat().st_mtime < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert path.stat().st_mtime > 2


def test_a_lock_that_another_process_has_taken_over_is_left_alone(tmp_path: Path) -> None:
    with lock_of(tmp_path):
        path = elsewhere(tmp_path / "other", age=0)
        (tmp_path / FILENAME).write_bytes(path.read_bytes())
    assert (tmp_path / FILENAME).read_bytes() == path.read_bytes()


def test_a_process_that_has_lost_it_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise two processes would train in the directory."""
    monkeypatch.setattr(lock, "BEAT", 0.05)
    killed = threading.Event()
    monkeypatch.setattr(lock, "kill_tree", lambda pid: killed.set() if pid == os.getpid() else None)
    with lock_of(tmp_path) as held:
        assert held.is_held
        (tmp_path / FILENAME).write_bytes(b"")
        assert not held.is_held
        assert not killed.wait(0.2), "a damaged file is no other process"
        (tmp_path / FILENAME).write_bytes(elsewhere(tmp_path / "other", age=0).read_bytes())
        assert not held.is_held
        assert killed.wait(60)


@pytest.mark.parametrize("is_suspended", [False, True])
def test_a_lock_without_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_suspended: bool) -> None:
    """While a machine is suspended, another one may train and end. A user who removes the file stops nothing."""
    monkeypatch.setattr(lock, "BEAT", 0.05)
    monkeypatch.setattr(lock, "HELD", 0.0 if is_suspended else 60.0)
    killed = threading.Event()
    monkeypatch.setattr(lock, "kill_tree", lambda pid: killed.set())
    with lock_of(tmp_path) as held:
        (tmp_path / FILENAME).unlink()
        assert killed.wait(60 if is_suspended else 0.3) == is_suspended
        assert not held.is_held


def test_a_full_disk_does_not_free_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with lock_of(tmp_path):
        for name in ("write", "pwrite"):
            monkeypatch.setattr(os, name, full)
        lock.join(tmp_path)  # as rank 0 of a job
        monkeypatch.undo()
        assert lock.holder(tmp_path) is not None


@pytest.mark.parametrize("age", [None, 50.0, 70.0])
def test_a_reader_without_permission_to_write(age: float | None) -> None:
    """A holder here, and holders on another machine. Root may write everywhere, so it becomes another user."""
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as name:  # pytest's folders are of one user
        folder = Path(name)
        folder.chmod(0o755)
        held = lock_of(folder).acquire() if age is None else None
        if age is not None:
            elsewhere(folder, age=age)
        folder.chmod(0o555)
        try:
            if user == 0:
                os.seteuid(65534)
            assert (lock.holder(folder) is None) == (age == 70)
        finally:
            os.seteuid(user)
            folder.chmod(0o755)
            if held is not None:
                held.release()


HOLDING = """
import sys, time
from pathlib import Path
from hydraloop.errors import UserError
from hydraloop.run_files import lock
from hydraloop.run_files.lock import RunLock, join

folder, what = Path(sys.argv[1]), sys.argv[2]
if what == "join":
    join(folder)
    print("joined", flush=True)
    sys.stdin.read()
else:
    if what == "race":  # all at once from here; acquiring takes long, as on a slow disk
        write = lock.write
        lock.write = lambda handle, holder: (time.sleep(0.1), write(handle, holder))
        print("ready", flush=True)
        sys.stdin.readline()
    try:
        RunLock(folder, key="k").acquire()
    except UserError:
        print("refused", flush=True)
    else:
        print("taken", flush=True)
        sys.stdin.read()
"""


def process(folder: Path, what: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLDING, str(folder), what]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_of_many_that_find_a_free_lock_one_takes_it(tmp_path: Path) -> None:
    written_by(tmp_path, age=0, processes=[])
    several = [process(tmp_path, "race") for _ in range(6)]
    outputs = [one.stdout for one in several if one.stdout is not None]
    assert [output.readline() for output in outputs] == ["ready\n"] * 6
    for one in several:
        assert one.stdin is not None
        one.stdin.write("go\n")
        one.stdin.flush()
    said = sorted(output.readline().strip() for output in outputs)
    for one in several:
        one.communicate("")
    assert said == ["refused"] * 5 + ["taken"]


def test_it_is_held_until_the_last_of_its_processes_has_ended(tmp_path: Path) -> None:
    parent = process(tmp_path, "take")
    assert parent.stdout is not None
    assert parent.stdout.readline() == "taken\n"
    rank = process(tmp_path, "join")
    assert rank.stdout is not None
    assert rank.stdout.readline() == "joined\n"
    parent.kill()
    parent.communicate()
    with pytest.raises(UserError, match=f"process {rank.pid} on "):
        lock_of(tmp_path).acquire()
    rank.communicate("")
    with lock_of(tmp_path):
        pass


def test_a_folder_that_cannot_be_written_is_a_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written") as caught:
        lock_of(tmp_path / "file" / "run").acquire()
    assert (caught.value.key, caught.value.remedy) == ("hydra.run.dir", "Name another directory.")

    def refuse(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(lock, "write", refuse)
    with pytest.raises(UserError, match="cannot be written: No space left on device") as caught:
        lock_of(tmp_path / "run").acquire()
    assert caught.value.remedy == "Free some space."
