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
from typing import Any

import psutil
import pytest
from omegaconf import OmegaConf

from hydraloop.commands.command_line import view as main
from hydraloop.config.checks import Draft
from hydraloop.errors import UserError
from hydraloop.files import environment, lock
from hydraloop.launch import detach
from hydraloop.sweeps.executors.slurm_queue import current_states
from hydraloop.sweeps.sweep_directory import SweepDirectory
from tests.e2e.projects import Project
from tests.e2e.warm import environment_of_python
from tests.processes import PATIENCE

STARTED: list[subprocess.Popen[bytes]] = []


class Popen(subprocess.Popen[bytes]):
    """A process that the test can wait for."""

    def __init__(self, *words: Any, **options: Any) -> None:
        super().__init__(*words, **options)
        STARTED.append(self)


def start(monkeypatch: pytest.MonkeyPatch, folder: Path, program: str) -> int | str | None:
    """Start a program in the background. Returns the exit code of the command."""
    monkeypatch.setattr(subprocess, "Popen", Popen)
    monkeypatch.setattr(environment, "command", lambda: ["python", "-c", program])
    draft = Draft(overrides=["seed=1", "detach=true"], cfg=OmegaConf.create(), typed=[])
    with pytest.raises(SystemExit) as ended:
        detach.start(draft, "hydra.run.dir", folder, "log")
    return ended.value.code


def test_the_command_returns_when_the_process_has_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = """if True:
        import os, pathlib, sys, time
        from hydraloop.files.lock import RunLock
        print(os.getpid(), os.getsid(0), sys.stdin.read(), sys.argv[1:])
        with RunLock(pathlib.Path(), key="") as lock:
            time.sleep(60)"""
    monkeypatch.chdir(tmp_path)
    assert start(monkeypatch, Path(), program) == 0
    pid, session, arguments = Path("log").read_text().split(" ", 2)
    process = STARTED.pop()
    process.kill()
    process.wait()
    assert int(pid) == process.pid == int(session)
    assert arguments.split() == ["['seed=1',", "\"hydra.run.dir='.'\",", "'detach=false']"]
    assert capsys.readouterr().out.splitlines() == [
        f". continues in the background, as process {pid}",
        *(f"  hydraloop {command} ." for command in ("status", "attach", "stop")),
    ]


@pytest.mark.parametrize(("end", "code"), [("raise SystemExit(2)", 2), ("import os; os.kill(os.getpid(), 9)", 137)])
def test_what_fails_before_that_is_the_outcome_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], end: str, code: int
) -> None:
    (tmp_path / "log").write_text("earlier\n")
    assert start(monkeypatch, tmp_path, f"print('error: nö'); {end}") == code
    assert capsys.readouterr().err == "error: nö\n"
    assert (tmp_path / "log").read_text() == "earlier\nerror: nö\n"


def test_a_signal_to_the_waiting_command_ends_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(detach.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start(monkeypatch, tmp_path, "import time; time.sleep(60)")
    assert STARTED.pop().returncode == -signal.SIGTERM


@pytest.mark.parametrize(
    "variables",
    [{"SLURM_JOB_ID": "7"}, {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}],
)
def test_it_is_refused_where_the_process_would_be_ended(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"^detach: "):
        detach.check()


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
        assert "\ninterrupted: the run: preempted by SIGTERM" in out, out
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
