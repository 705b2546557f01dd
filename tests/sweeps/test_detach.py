"""A command that returns while a background process continues."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

import psutil
import pytest

from hydraloop.commands.dispatch import run as main
from hydraloop.run_files import lock
from hydraloop.run_files.processes import is_alive, started
from hydraloop.sweeps.current_states import current_states
from hydraloop.sweeps.sweep_directory import SweepDirectory
from tests.e2e.projects import Project
from tests.e2e.warm import SERVER, environment_of_python
from tests.processes import PATIENCE

SCRIPT = """
import os, sys, time
from pathlib import Path
from hydraloop.processes.termination_signals import terminable
from hydraloop.processes.detach import detached

with terminable():
    background = detached()
    print("to the terminal")
    {act}
"""
READY = """background.log_to(Path("log"))
    print(os.getpid(), os.getsid(0), sys.stdin.read(), flush=True)
    background.ready(Path("here"))
    time.sleep(60)"""


def run(folder: Path, act: str, **environment: str) -> tuple[int, str, str]:
    """Detach in a process of its own. Returns its exit code, its output and its errors."""
    (folder / "script.py").write_text(SCRIPT.format(act=act))
    return SERVER.run(["script.py"], folder, environment_of_python() | environment)


def test_the_command_returns_when_the_background_process_is_ready(tmp_path: Path) -> None:
    code, out, err = run(tmp_path, READY)
    assert (code, err) == (0, "")
    pid, session = (tmp_path / "log").read_text().split()
    try:
        assert pid == session, "a session of its own"
        assert psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE
        assert out.splitlines() == [
            "to the terminal",
            f"here continues in the background, as process {pid}",
            *(f"  python -m hydraloop {command} here" for command in ("status", "attach", "logs -f", "stop")),
        ]
    finally:
        os.kill(int(pid), signal.SIGKILL)


def test_what_fails_before_that_is_the_outcome_of_the_command(tmp_path: Path) -> None:
    code, out, _ = run(tmp_path, "sys.exit(2)")
    assert (code, out) == (2, "to the terminal\n")
    (tmp_path / "log").write_text("earlier\n")
    code, _, err = run(tmp_path, 'background.log_to(Path("log")); print("error: no"); sys.exit(1)')
    assert (code, err) == (1, "error: no\n")
    assert (tmp_path / "log").read_text() == "earlier\nerror: no\n"
    assert run(tmp_path, "os.kill(os.getpid(), 9)")[0] == 137


def test_a_signal_to_the_waiting_command_ends_both(tmp_path: Path) -> None:
    """Also if it comes before the command waits."""
    late = "import os, time\nos.register_at_fork(after_in_parent=lambda: time.sleep(0.2))\n"
    act = """Path("pid").write_text(f"{os.getpid()}\\n")
    try: time.sleep(60)
    except KeyboardInterrupt as error: Path("error").write_text(repr(error)); raise"""
    (tmp_path / "script.py").write_text(late + SCRIPT.format(act=act))
    script = SERVER.start(["script.py"], tmp_path, environment_of_python())
    written = tmp_path / "pid"
    while not (written.exists() and written.read_text().endswith("\n")):
        time.sleep(0.01)
    pid = int(written.read_text())
    since = started(pid)
    script.send_signal(signal.SIGTERM)
    assert script.wait(20) != 0
    assert not is_alive(pid, since)
    assert (tmp_path / "error").read_text() == "Terminated('by SIGTERM')"


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({"SLURM_JOB_ID": "7"}, "end with its script"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, "torchrun waits"),
    ],
)
def test_it_is_refused_where_the_background_process_would_be_ended(
    tmp_path: Path, environment: dict[str, str], problem: str
) -> None:
    code, out, err = run(tmp_path, "", **environment)
    assert code == 1
    assert out == ""
    assert "detach: " in err
    assert problem in err


@contextmanager
def closed_terminal(folder: Path, line: str) -> Iterator[str]:
    """Type a line in a terminal, and close the terminal when the command has returned. Yields what was printed."""
    terminal = subprocess.Popen(
        [sys.executable, "-c", "import pty; pty.spawn(['sh', '-c', 'exec 2>&1; eval $LINE; sleep 600'])"],
        cwd=folder,
        env=environment_of_python() | {"LINE": line.replace("python", sys.executable, 1)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert terminal.stdout is not None
    printed = "".join(takewhile(lambda text: "hydraloop stop" not in text, terminal.stdout))
    shell = psutil.Process(terminal.pid).children()[0]
    terminal.kill()
    shell.wait(20)
    yield printed
    terminal.communicate()


@pytest.mark.slow
def test_a_run_continues_without_its_terminal_until_it_is_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = Project.make(tmp_path / "project")
    run_dir = project.path / "mine"
    line = "python train.py experiment=spirals engine.max_epochs=1000000 hydra.run.dir=mine detach=true"
    with closed_terminal(project.path, line) as printed:
        assert "mine continues in the background, as process " in printed, printed
        assert main(["status", str(run_dir)]) == 0
        assert capsys.readouterr().out.startswith("running: the run: process ")
        while not (run_dir / "checkpoints" / "last_checkpoint").exists():
            time.sleep(0.05)
        assert main(["stop", str(run_dir)]) == 0
        out = capsys.readouterr().out
        assert out.startswith("processes ended: 1\ninterrupted: the run: preempted by SIGTERM"), out
        assert "train  " in (run_dir / "output.log").read_text()


def stopped_job(sweep: SweepDirectory) -> tuple[int, int]:
    """Wait for a job that runs, and stop its process. Returns both. The first jobs are left alone."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        for state in sweep.states()[2:]:
            held = lock.holder(sweep.folder(state.number)) if state.state == "running" else None
            if held is not None and held.pid:
                os.kill(held.pid, signal.SIGSTOP)
                if lock.holder(sweep.folder(state.number)) == held:
                    return state.number, held.pid
                os.kill(held.pid, signal.SIGCONT)
        time.sleep(0.001)
    raise AssertionError(f"no job was seen while it ran: {sweep.states()}")


@pytest.mark.slow
def test_a_sweep_without_its_terminal_whose_controller_and_job_are_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = Project.make(tmp_path / "project")
    short = "engine.max_iters=100 engine.limit_val_batches=1 engine.test=false"
    line = f"-m optimizer.lr=1e-4,3e-4 'hooks=[],[ema]' seed=0,1 {short}"
    with closed_terminal(project.path, f"python train.py {line} detach=true") as printed:
        assert " continues in the background, as process " in printed, printed
        (path,) = project.path.glob("multirun/*/*")
        sweep = SweepDirectory.load(path)
        job, pid_of_job = stopped_job(sweep)
        controller = sweep.holder()
        assert controller is not None
        for pid in (controller.pid, pid_of_job):
            os.kill(pid, signal.SIGKILL)
    before = [state for state in current_states(sweep) if state.state != "queued"]
    done = project.train(*shlex.split(line), "sweep.resume=auto")
    assert done.code == 0, done.text
    assert main(["status", str(path)]) == 0
    assert "8 finished" in capsys.readouterr().out
    states = sweep.states()
    assert [state.attempts for state in states] == [1 + (state.number == job) for state in states]
    assert states[:job] == before[:job]
    rows = json.loads((path / "results.json").read_text())["rows"]
    assert sorted((row["job"], row["status"]) for row in rows) == [(number, "finished") for number in range(8)]
    assert done.out.count("  finished  ") == 8, done.out
