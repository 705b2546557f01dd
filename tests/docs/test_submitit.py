"""submitit starts a preempted job again, with the file of docs/how-to/preemption.md."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.docs.pages import blocks
from tests.e2e.projects import REPOSITORY, Project

pytest.importorskip("submitit", reason="submitit is not installed: pip install submitit")
LAST = "checkpoints/epoch_20.pth"
WHOLE = """
import hydraloop
hydraloop.build(hydraloop.compose(["engine.max_epochs=20"]), run_dir="outputs/whole").train()
"""


def _task(pid: int) -> int:
    """Return the process of the job; submitit starts it in the executor's process, not in the script's."""
    tasks = [child for child in psutil.Process(pid).children(recursive=True) if "_submit" in " ".join(child.cmdline())]
    return tasks[0].pid


@pytest.mark.nightly
def test_a_preempted_job_is_started_again_and_ends_with_the_same_bits(tmp_path: Path) -> None:
    project = Project.make(tmp_path / "project")
    page = blocks(REPOSITORY / "docs" / "how-to" / "preemption.md")
    project.write("submit.py", next(block.text for block in page if block.file == "submit.py"))
    first = project.path / "outputs" / "my_run" / "checkpoints" / "epoch_1.pth"
    with subprocess.Popen([sys.executable, "submit.py"], cwd=project.path, stdout=subprocess.PIPE, text=True) as script:
        deadline = time.monotonic() + 120
        while not first.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(_task(script.pid), signal.SIGUSR2)
        printed, _ = script.communicate(timeout=120)
    assert (script.returncode, printed) == (0, "finished\n")
    log = "".join(file.read_text() for file in (project.path / "outputs" / "submitit").glob("*_log.out"))
    assert "resumed at" in log
    project.write("whole.py", WHOLE)
    assert project.python("whole.py").code == 0
    resumed, whole = (torch.load(project.path / "outputs" / run / LAST) for run in ("my_run", "whole"))
    for name, value in whole["state_dict"].items():
        assert torch.equal(resumed["state_dict"][name], value)
