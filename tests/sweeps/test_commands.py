"""`python -m hydraloop status|logs|stop` on directories as sweeps and runs leave them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from hydraloop.run.lock import RunLock
from hydraloop.run.processes import is_alive, started
from hydraloop.sweeps.commands import main
from tests.e2e.warm import SERVER, environment_of_python

TRAINING = """
import os, signal, time
from pathlib import Path
from hydraloop.run.lock import RunLock

RunLock(Path("run"), key="").acquire()
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


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A detached run that has finished."""
    run_dir = tmp_path / "run"
    (run_dir / ".hydra").mkdir(parents=True)
    (run_dir / "result.json").write_text(json.dumps({"status": "finished", "val_metrics": {"loss": 0.5}}))
    (run_dir / "output.log").write_text("epoch 1\n")
    return run_dir


def test_logs_prints_what_the_run_has_printed(run: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(["logs", "-f", str(run)]) == 0
    assert capfdbinary.readouterr().out == b"epoch 1\n"


def test_a_running_run_is_named_with_its_process(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLock(run, key="hydra.run.dir"):
        assert main(["status", str(run)]) == 0
        assert f"running: the run: process {os.getpid()} on " in capsys.readouterr().out


def test_bad_input_is_one_message(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(run.parent)]) == 2
    assert capsys.readouterr().err.startswith(f"error: directory: {run.parent} holds no sweep and no run\n  ")
    (run / "output.log").unlink()
    assert main(["logs", str(run)]) == 2
    assert capsys.readouterr().err.count("error: ") == 1


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
        "2 processes have ended, 1 of them by a kill",
        "interrupted: the run: its process was killed",
    ]
    assert not is_alive(child, since)
    assert script.wait(20) == -15
    assert main(["stop", str(run)]) == 0
    assert capsys.readouterr().out.startswith("0 processes have ended\n")
