"""`python -m hydraloop status|attach|results|stop` on directories as sweeps and runs leave them."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE

import pytest

from hydraloop.commands.command_line import view as main
from hydraloop.files.lock import RunLock
from hydraloop.files.result import Objective, Result
from hydraloop.launch.termination import is_alive, started
from hydraloop.sweeps import job_states
from hydraloop.sweeps.executors.slurm_queue import current_states
from hydraloop.sweeps.job_states import JobState
from hydraloop.sweeps.sweep_directory import SweepDirectory
from tests.e2e.warm import SERVER, Script, environment_of_python
from tests.sweeps import written

SAVES = """
import os, signal, time
from pathlib import Path
from hydraloop.files.lock import RunLock

def save(number, frame):
    time.sleep(0.3)
    Path("saved").touch()
    os._exit(75)

held = RunLock(Path("run"), key="").acquire()
signal.signal(signal.SIGTERM, save)
Path("ready").touch()
time.sleep(60)
"""

HANGS = """
import os, signal, time
from pathlib import Path
from hydraloop.files.lock import RunLock

held = RunLock(Path("run"), key="").acquire()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:  # as a rank of torch's launcher
    os.setsid()
    Path("child").write_text(f"{os.getpid()}\\n")
    Path("ready").touch()
time.sleep(60)
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
        job_states.write(made.folder(number), changed, flush=False)
    (made.folder(1) / "job.log").write_text("line\n")
    return made


def test_status_of_a_sweep(sweep: SweepDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    written.write(sweep, {0: written.finished(0.9)})
    now = {"iteration": 20, "timestamp": time.time()}
    records = {"mode": "train", "eta": 600.0, "loss": 0.1, **now}, {"mode": "val", "accuracy": 0.5, **now}
    (sweep.folder(3) / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    with RunLock(sweep.folder(3), key="sweep"):
        assert main(["status", str(sweep.path)]) == 0
    line = "python train.py -m optimizer.lr=1e-3,1e-2 seed=0,1,2"
    assert re.sub(r"0:09:\d\d left", "0:10:00 left", capsys.readouterr().out).splitlines() == [
        f"{sweep.path}: {line}",
        "6 jobs: 1 finished, 1 failed, 1 interrupted, 1 running, 2 queued",
        f"No controller is running. Continue the sweep: {line} sweep.resume={sweep.path}",
        "best without averages: job 0, accuracy 0.9000 (optimizer.lr=1e-3 seed=0)",
        f"running: job 3 (optimizer.lr=1e-2 seed=0): process {os.getpid()} on {socket.gethostname()}, "
        "iteration 20, accuracy 0.5000, about 0:10:00 left",
        "interrupted: job 2 (optimizer.lr=1e-3 seed=2): its process was killed, or it has not trained",
        "failed: job 1 (optimizer.lr=1e-3 seed=1): ValueError: no",
        f"  {sweep.folder(1) / 'job.log'}",
    ]
    (sweep.folder(2) / ".hydra").mkdir()
    with sweep.controller_lock:
        assert main(["status", str(sweep.path)]) == 0
        assert f"controller: process {os.getpid()} on " in capsys.readouterr().out
        assert main(["status", str(sweep.folder(2))]) == 0
        assert capsys.readouterr().out == "running: the run\n", "it waits for a worker, or for the end of its ranks"
    assert main(["status", str(sweep.folder(2))]) == 0
    assert capsys.readouterr().out == "interrupted: the run: its process was killed, or it has not trained\n"
    (sweep.folder(2) / "metrics.jsonl").touch()
    assert main(["status", str(sweep.folder(2))]) == 0
    assert capsys.readouterr().out.startswith("interrupted: the run: its process was killed\n")


def test_status_of_many_jobs_groups_errors_and_names_no_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seeds = ",".join(map(str, range(400)))
    made = written.sweep(tmp_path / "sweep", f"seed={seeds}", command=("python", "train.py", "-m"))
    memory = (
        "OutOfMemoryError: CUDA out of memory. Tried to allocate {} MiB. GPU 0 has a total capacity of 79.15 GiB.\nmore"
    )
    jobs = {number: {"state": "failed", "error": memory.format(number)} for number in range(5, 17)}
    written.write(made, {3: {"state": "failed", "error": "ValueError: no"}, **jobs})
    (made.folder(5) / "job.log").touch()
    assert main(["status", str(made.path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{made.path}: python train.py -m seed={seeds[:35]}…{seeds[-10:]}",
        "400 jobs: 387 queued, 13 failed",
        f"No controller is running. Continue the sweep: <the same command> sweep.resume={made.path}",
        "failed: 12 jobs: OutOfMemoryError: CUDA out of memory",
        f"  {made.folder(5) / 'job.log'}",
        "failed: job 3 (seed=3): ValueError: no",
    ]
    written.write(made, dict.fromkeys(range(400), written.finished(0.5)))
    assert main(["results", str(made.path)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith("over 400 of 400 jobs; the command that runs it again is in results.json")


HOSTILE = "\x1b]52;c;Y3VybA==\x07\x1b[31mred\x1b[0m \x9b2J\u202e\r"
"""Writes the clipboard, colours, empties the screen, and reverses the direction of text."""
VISIBLE = "\\x1b]52;c;Y3VybA==\\x07red \\x9b2J\\u202e"


@pytest.mark.parametrize("words", ["status", "runs", "results", "results --json"])
def test_escape_sequences_in_files_do_not_reach_the_terminal(
    words: str, sweep: SweepDirectory, capfd: pytest.CaptureFixture[str]
) -> None:
    command, *rest = words.split()
    failed = replace(sweep.states()[1], error=f"ValueError: {HOSTILE}", metric=HOSTILE, value=1.0)
    job_states.write(sweep.folder(1), failed, flush=False)
    job_states.write(sweep.folder(0), replace(sweep.states()[0], checkpoint=HOSTILE), flush=False)
    for number in (2, 3):
        job_states.write(sweep.folder(number), replace(sweep.states()[number], state="finished"), flush=False)
    assert main([command, str(sweep.path), *rest]) == 0
    said = "".join(capfd.readouterr())
    assert [text for text in ("\x1b", "\x07", "\x9b", "\u202e", "\r") if text in said] == []
    assert ("]52;c;Y3VybA==" if rest == ["--json"] else VISIBLE) in said


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


def test_stop_of_a_sweep_whose_jobs_were_killed(sweep: SweepDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stop", str(sweep.path)]) == 0
    assert [state.state for state in current_states(sweep)][2:4] == ["interrupted", "interrupted"]


def test_attach_follows_the_log_of_a_run_to_its_end(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lock = RunLock(run, key="hydra.run.dir").acquire()

    def end() -> None:
        with (run / "output.log").open("a") as file:
            file.write("\x1b[31mlast\n")
        lock.release()

    timer = threading.Timer(0.1, end)
    timer.start()
    assert main(["attach", str(run)]) == 0
    assert capfd.readouterr().out == "epoch 1\nlast\n"
    timer.join()


def test_a_running_run_is_named_with_its_process(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Result("finished", objective=Objective("accuracy", "greater", 0.9, 5)).write(run)
    with RunLock(run, key="hydra.run.dir"):
        assert main(["status", str(run)]) == 0
        out = capsys.readouterr().out
        assert f"running: the run: process {os.getpid()} on " in out
        assert "best" not in out, "the result is of an earlier attempt"
    assert main(["status", str(run)]) == 0
    assert "\nbest: accuracy 0.9000 (no best checkpoint)\n" in capsys.readouterr().out


def _begin(run: Path, program: str) -> Script:
    """Start a program that locks a run, and wait until it is ready."""
    (run / "result.json").unlink()
    (run.parent / "train.py").write_text(program)
    script = SERVER.start(["train.py"], run.parent, environment_of_python())
    while not (run.parent / "ready").exists():
        time.sleep(0.01)
    return script


def test_a_run_that_has_written_nothing_yet_is_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`detach=true` ends when its run has locked the directory."""
    with RunLock(tmp_path, key="hydra.run.dir"):
        assert main(["status", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("running: the run: process ")


def test_stop_lets_a_run_save(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = _begin(run, SAVES)
    assert main(["stop", str(run)]) == 0
    out = capsys.readouterr().out
    assert re.match(r"process \d+ saves and ends; to kill it, repeat the command\ninterrupted: ", out), out
    assert script.wait(20) == 75
    assert (run.parent / "saved").exists()


@pytest.mark.parametrize("flags", [[], ["--kill"]])
def test_a_second_stop_and_kill_leave_no_process(run: Path, flags: list[str]) -> None:
    script = _begin(run, HANGS)
    child = int((run.parent / "child").read_text())
    since = started(child)
    first = None
    if not flags:
        command = [sys.executable, "-m", "hydraloop", "stop", str(run)]
        first = subprocess.Popen(command, stdout=PIPE, text=True, env=environment_of_python())
        assert first.stdout is not None
        assert "to kill it, repeat the command" in first.stdout.readline()
    assert main(["stop", *flags, str(run)]) == 0
    assert script.wait(20) == -9
    assert not is_alive(child, since)
    if first is not None:
        assert "its process was killed" in first.communicate()[0]


def test_attach_prints_what_the_controller_does_and_that_none_is_running(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made = written.sweep(tmp_path / "sweep", "seed=0,1", "hydra.sweep.dir=any-${now:%H}")
    assert main(["attach", str(made.path)]) == 2
    assert "was not detached" in capfd.readouterr().err
    (made.path / "controller.log").write_text("job 0 started\n")
    assert main(["attach", str(made.path)]) == 0
    command = f"python train.py seed=0,1 sweep.resume={made.path}"
    assert capfd.readouterr().out == f"job 0 started\nNo controller is running. Continue the sweep: {command}\n"


def test_results_print_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = written.sweep(tmp_path / "sweep", "seed=0,1")
    written.write(made, {0: written.finished(0.5), 1: written.finished(0.75)})
    assert main(["results", "--json", str(made.path)]) == 0
    assert json.loads(capsys.readouterr().out)["best"]["command"] == "python train.py -m seed=0,1"
    assert not (made.path / "results.json").exists()
    assert main(["results", str(made.path)]) == 0
    assert "best: mean accuracy 0.6250 over 2 of 2 jobs" in capsys.readouterr().out
    assert (made.path / "results.csv").exists()
