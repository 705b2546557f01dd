"""`python -m hydraloop status|attach|logs|results|stop` on directories as sweeps and runs leave them."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE

import psutil
import pytest

from hydraloop.commands.dispatch import run as main
from hydraloop.run_files.checkpoint_files import is_complete
from hydraloop.run_files.lock import RunLock
from hydraloop.run_files.processes import is_alive, started
from hydraloop.run_files.result import Result
from hydraloop.sweeps import states, stopping
from hydraloop.sweeps.current_states import current_states
from hydraloop.sweeps.states import JobState
from hydraloop.sweeps.sweep_directory import SweepDirectory
from tests.e2e.projects import Project
from tests.e2e.warm import SERVER, Script, environment_of_python
from tests.marks import nightly, slow
from tests.sweeps import written

TRAINING = """
import os, signal, time
from pathlib import Path
from hydraloop.run_files.lock import RunLock

held = RunLock(Path("run"), key="").acquire()
if os.fork() == 0:  # as a rank of torch's launcher
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path("child").write_text(f"{os.getpid()}\\n")
    time.sleep(60)
while not Path("child").exists():
    time.sleep(0.01)
Path("ready").touch()
time.sleep(60)
"""

SAVING = """
import os, signal, threading, time
from pathlib import Path
import torch
from hydraloop.engine.checkpoint import format
from hydraloop.run_files.lock import RunLock

def save(checkpoint, file, save=torch.save):
    save(checkpoint, file)
    with file.open("rb"):  # a slow disk
        Path("saves").touch()
        while not Path("done").exists():
            time.sleep(0.01)

def save_and_end():
    format.write(Path("elsewhere/epoch_1.pth"), {"state_dict": {}})
    told.wait()
    os._exit(75)

torch.save = save
told = threading.Event()
signal.signal(signal.SIGTERM, lambda number, frame: told.set())
held = RunLock(Path("run"), key="").acquire()
threading.Thread(target=save_and_end).start()
threading.Event().wait()
"""

SLOW = """
import os, time
from pathlib import Path
import torch
from hydraloop import Hook

PROJECT = Path(__file__).resolve().parents[1]

class Slow(Hook):
    def before_run(self, engine):
        def slow(checkpoint, file, save=torch.save):
            save(checkpoint, file)
            if not isinstance(file, Path):  # what ranks exchange
                return
            with file.open("rb"):
                (PROJECT / f"saves-{os.getpid()}").touch()
                while not (PROJECT / "done").exists():
                    time.sleep(0.01)
        torch.save = slow
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A detached run that has finished."""
    run_dir = tmp_path / "run"
    (run_dir / ".hydra").mkdir(parents=True)
    (run_dir / "result.json").write_text(json.dumps({"status": "finished", "val_metrics": {"loss": 0.5}}))
    (run_dir / "output.log").write_text("epoch 1\n")
    return run_dir


@pytest.fixture
def sweep(tmp_path: Path) -> SweepDirectory:
    """A sweep without a controller: job 0 has finished, 1 has failed, 2 was killed, 3 runs in this process."""
    axes = ("optimizer.lr=1e-3,1e-2", "seed=0,1,2")
    made = written.sweep(tmp_path / "sweep", *axes, command=("python", "train.py", "-m"))
    began = JobState(0, "running", attempts=1, began=time.time())
    for number, state in enumerate(("finished", "failed", "running", "running")):
        made.folder(number).mkdir()
        error = "ValueError: no" if state == "failed" else None
        changed = replace(began, number=number, state=state, directory=str(number), error=error)
        states.write(made.folder(number), changed, flush=False)
    (made.folder(1) / "job.log").write_text("line\n")
    return made


def test_status_of_a_sweep(sweep: SweepDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLock(sweep.folder(3), key="sweep"):
        assert main(["status", str(sweep.path)]) == 0
    line = "python train.py -m optimizer.lr=1e-3,1e-2 seed=0,1,2"
    assert capsys.readouterr().out.splitlines() == [
        f"{sweep.path}: {line}",
        "6 jobs: 1 finished, 1 failed, 1 interrupted, 1 running, 2 queued",
        f"No controller is running. Continue the sweep: {line} sweep.resume={sweep.path}",
        f"running: job 3 (optimizer.lr=1e-2 seed=0): process {os.getpid()} on {socket.gethostname()}",
        "interrupted: job 2 (optimizer.lr=1e-3 seed=2): its process was killed",
        "failed: job 1 (optimizer.lr=1e-3 seed=1): ValueError: no",
        f"  {sweep.folder(1) / 'job.log'}",
    ]
    with sweep.lock:
        assert main(["status", str(sweep.path)]) == 0
    assert f"controller: process {os.getpid()} on " in capsys.readouterr().out


HOSTILE = "\x1b]52;c;Y3VybA==\x07\x1b[31mred\x1b[0m \x9b2J\u202e\r"
"""Writes the clipboard, colours, empties the screen, and reverses the direction of text."""
VISIBLE = "\\x1b]52;c;Y3VybA==\\x07red \\x9b2J\\u202e"


@pytest.mark.parametrize("words", ["status", "runs", "logs 1", "results", "results --json", "attach"])
def test_escape_sequences_in_files_do_not_reach_the_terminal(
    words: str, sweep: SweepDirectory, capfd: pytest.CaptureFixture[str]
) -> None:
    command, *rest = words.split()
    failed = replace(sweep.states()[1], error=f"ValueError: {HOSTILE}", metric=HOSTILE, value=1.0)
    states.write(sweep.folder(1), failed, flush=False)
    states.write(sweep.folder(0), replace(sweep.states()[0], checkpoint=HOSTILE), flush=False)
    (sweep.folder(1) / "job.log").write_text(f"{HOSTILE}\nlast\n")
    for number in (2, 3):
        states.write(sweep.folder(number), replace(sweep.states()[number], state="finished"), flush=False)
    assert main([command, str(sweep.path), *rest]) == 0
    said = "".join(capfd.readouterr())
    assert [text for text in ("\x1b", "\x07", "\x9b", "\u202e", "\r") if text in said] == []
    assert ("]52;c;Y3VybA==" if rest == ["--json"] else VISIBLE) in said
    assert "last\n" in said or command != "logs"


@pytest.mark.parametrize("checkpoints", [[], ["epoch_1.pth"]])
@pytest.mark.parametrize("state", ["interrupted", "paused"])
def test_status_of_an_interrupted_run_has_a_command_if_the_run_can_continue(
    state: str, checkpoints: list[str], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "result.json").unlink()  # it was killed
    if state == "paused":
        Result("interrupted", reason="preempted by engine.pause_after=1").write(run)
    (run / "checkpoints").mkdir()
    for name in checkpoints:
        (run / "checkpoints" / name).touch()
    assert main(["status", str(run)]) == 0
    found = capsys.readouterr().out
    assert state in found
    assert found.count("resume") == len(checkpoints)


def test_logs_of_a_sweep(sweep: SweepDirectory, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", str(sweep.path), "1"]) == 0
    assert capfd.readouterr().out == "line\n"


def test_a_followed_log_ends_with_its_job(sweep: SweepDirectory, capfd: pytest.CaptureFixture[str]) -> None:
    lock = RunLock(sweep.folder(1), key="sweep").acquire()

    def end() -> None:
        with (sweep.folder(1) / "job.log").open("a") as file:
            file.write("last\n")
        lock.release()

    timer = threading.Timer(0.1, end)
    timer.start()
    assert main(["logs", "-f", str(sweep.path), "1"]) == 0
    assert capfd.readouterr().out == "line\nlast\n"
    timer.join()


def test_stop_of_a_sweep_whose_jobs_were_killed(sweep: SweepDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stop", str(sweep.path)]) == 0
    assert [state.state for state in current_states(sweep)][2:4] == ["interrupted", "interrupted"]
    assert capsys.readouterr().out.startswith("processes ended: 0\n")


@contextmanager
def _locked_for(pid: int, folder: Path) -> Iterator[None]:
    """In the body, the lock of a folder names another process."""
    with RunLock(folder, key=""):
        hint = folder / ".lock.json"
        hint.write_text(json.dumps({**json.loads(hint.read_text()), "pid": pid}))
        yield


def test_logs_prints_what_the_run_has_printed(run: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(["logs", "-f", str(run)]) == 0
    assert capfdbinary.readouterr().out == b"epoch 1\n"


def test_a_running_run_is_named_with_its_process(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLock(run, key="hydra.run.dir"):
        assert main(["status", str(run)]) == 0
        assert f"running: the run: process {os.getpid()} on " in capsys.readouterr().out


def test_stop_leaves_no_process(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "result.json").unlink()
    (run.parent / "train.py").write_text(TRAINING)
    script = SERVER.start(["train.py"], run.parent, environment_of_python())
    while not (run.parent / "ready").exists():
        time.sleep(0.01)
    child = int((run.parent / "child").read_text())
    since = started(child)
    assert since is not None
    assert main(["stop", str(run), "--wait", "0.5"]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        "processes ended: 2, killed: 1",
        "interrupted: the run: its process was killed",
    ]
    assert not is_alive(child, since)
    assert script.wait(20) == -15
    assert main(["stop", str(run)]) == 0
    assert capsys.readouterr().out.startswith("processes ended: 0\n")


@pytest.fixture
def saving(run: Path) -> Iterator[Script]:
    """A run that is writing a checkpoint in a thread, outside its directory, until the file `done` exists."""
    (run / "result.json").unlink()
    (run.parent / "train.py").write_text(SAVING)
    script = SERVER.start(["train.py"], run.parent, environment_of_python())
    while not (run.parent / "saves").exists():
        time.sleep(0.01)
    yield script
    script.kill()
    script.communicate()


@contextmanager
def _stopping(run: Path, seconds: float = 0.5) -> Iterator[subprocess.Popen[str]]:
    """Start `stop`, and wait until it says what it waits for, or has ended."""
    command = [sys.executable, "-m", "hydraloop", "stop", str(run), "--wait", str(seconds)]
    with subprocess.Popen(command, stdout=PIPE, text=True, env=environment_of_python()) as stop:
        assert stop.stdout is not None
        kill = f"python -m hydraloop stop --kill {run}"
        assert stop.stdout.readline() == f"waiting for a checkpoint that is being written; kill the run: {kill}\n"
        yield stop


def test_stop_waits_for_a_save(run: Path, saving: Script) -> None:
    with _stopping(run) as stop:
        (run.parent / "done").touch()
        assert stop.communicate()[0].startswith("processes ended: 1\ninterrupted: ")
    assert saving.wait(20) == 75
    assert is_complete(run.parent / "elsewhere" / "epoch_1.pth")


RANKS = "hydra.run.dir=mine distributed.nproc_per_node=2"
JOBS = "-m seed=0,1 sweep.max_workers=2 hydra.sweep.dir=mine"


def _slow_saves(project: Project, line: str, count: int) -> Script:
    """Start a training, and wait until so many processes are saving. They do until the file `done` exists."""
    project.write("my_project/slow.py", SLOW)
    command = f"{line} experiment=spirals engine.max_epochs=1000000 +hooks.slow._target_=my_project.slow.Slow"
    script = project.begin(*command.split())
    while len([*project.path.glob("saves-*")]) < count:
        assert script.poll() is None, script.printed
        time.sleep(0.05)
    return script


@pytest.mark.parametrize(("line", "count"), [nightly(RANKS, 1), slow(JOBS, 2)])
def test_stop_waits_for_the_saves_of_ranks_and_of_jobs(line: str, count: int, tmp_path: Path) -> None:
    project = Project.make(tmp_path / "project")
    script = _slow_saves(project, line, count)
    with _stopping(project.path / "mine", 10.0) as stop:
        (project.path / "done").touch()
        assert "killed" not in stop.communicate()[0].splitlines()[0]
    assert script.wait(20) == 75, script.printed
    results = [*(project.path / "mine").rglob("result.json")]
    assert [json.loads(path.read_text())["reason"] for path in results] == ["preempted by SIGTERM"] * count
    assert all(map(is_complete, (project.path / "mine").rglob("*.pth")))


@pytest.mark.slow
def test_a_second_stop_kills_a_sweep_whose_saves_hang(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project = Project.make(tmp_path / "project")
    script = _slow_saves(project, JOBS, 2)
    with _stopping(project.path / "mine"):
        assert main(["stop", str(project.path / "mine")]) == 0
    out = capsys.readouterr().out
    assert re.match(r"processes ended: (\d+), killed: \1\n", out), out
    assert "\n2 jobs: 2 interrupted\n" in out
    assert script.wait(20) == -9


def test_a_second_stop_kills_a_run_whose_save_hangs(
    run: Path, saving: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    with _stopping(run):
        assert main(["stop", str(run)]) == 0
    assert capsys.readouterr().out.startswith("processes ended: 1, killed: 1\n")
    assert saving.wait(20) == -9


def test_stop_with_kill_kills_a_run_that_saves(run: Path, saving: Script, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stop", "--kill", str(run)]) == 0
    assert capsys.readouterr().out.startswith("processes ended: 1, killed: 1\n")
    assert saving.wait(20) == -9


def test_stop_names_what_it_cannot_end(
    run: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process in state D, or of another user."""
    monkeypatch.setattr(stopping, "_DYING", 0.2)
    monkeypatch.setattr(psutil.Process, "kill", lambda process: None)
    process = subprocess.Popen(["sh", "-c", "trap '' TERM; echo; read line"], stdin=PIPE, stdout=PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    with _locked_for(process.pid, run):
        assert main(["stop", str(run), "--wait", "0"]) == 1
    printed = capfd.readouterr()
    assert printed.out == "processes ended: 0\n"
    assert printed.err == f"error: these processes could not be ended: ps -o pid,user,stat,args -p {process.pid}\n"
    process.communicate(b"\n")


def test_attach_says_that_no_controller_is_running(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = written.sweep(tmp_path / "sweep", "seed=0,1", "hydra.sweep.dir=any-${now:%H}")
    written.write(made, {0: written.finished(0.5)})
    assert main(["attach", str(made.path)]) == 0
    command = f"python train.py seed=0,1 sweep.resume={made.path}"
    assert capsys.readouterr().out.endswith(f"No controller is running. Continue the sweep: {command}\n")


def test_attach_without_a_terminal_prints_messages_only(sweep: SweepDirectory) -> None:
    command = [sys.executable, "-m", "hydraloop", "attach", str(sweep.path)]
    with (
        RunLock(sweep.folder(3), key="sweep"),
        subprocess.Popen(command, stdout=PIPE, text=True, env=environment_of_python()) as attached,
    ):
        assert attached.stdout is not None
        line = attached.stdout.readline()
        attached.kill()
    assert line == "job 3 (optimizer.lr=1e-2 seed=0) started\n"


def test_results_and_attach_print_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = written.sweep(tmp_path / "sweep", "seed=0,1")
    written.write(made, {0: written.finished(0.5), 1: written.finished(0.75)})
    assert main(["results", "--json", str(made.path)]) == 0
    assert json.loads(capsys.readouterr().out)["best"]["command"] == "python train.py -m seed=0,1"
    assert not (made.path / "results.json").exists()
    for command in ("results", "attach"):
        assert main([command, str(made.path)]) == 0
        assert "best: mean accuracy 0.6250 over 2 of 2 jobs" in capsys.readouterr().out
    assert (made.path / "results.csv").exists()
