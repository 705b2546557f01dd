"""Which rank was killed, as rank 0 sees it under torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hydraloop.launch import rank_log, torchrun
from hydraloop.launch.job import Job

BEGIN = """
import os, socket, sys
from pathlib import Path
import torch.distributed as dist
from hydraloop.launch import torchrun
from hydraloop.run.processes import started

store, rank, log = dist.FileStore(sys.argv[1], 3), int(sys.argv[2]), Path(sys.argv[3])
process = (socket.gethostname(), os.getpid(), started(os.getpid()))
torchrun._note(store, "began", rank, *process, log.stat().st_size)
print("began", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(config="{}", run_dir=str(tmp_path), checkpoint=None, began=0.0)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("WORLD_SIZE", "3")
    return dist.FileStore(str(tmp_path / "store"), 3)


@pytest.fixture
def ranks(store: Any, job: Job, tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Ranks 1 and 2, which have started."""
    processes = []
    for rank in (1, 2):
        log = rank_log.path(job, rank)
        log.write_text("Fatal Python error: Aborted\n", encoding="utf-8")  # by an earlier start
        command = [sys.executable, "-c", BEGIN, str(tmp_path / "store"), str(rank), str(log)]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "began\n"
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def killed(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def test_ranks_that_live_or_have_ended_have_not_died(ranks: list[subprocess.Popen[str]], store: Any, job: Job) -> None:
    assert torchrun._killed(store, job) is None
    for rank, process in enumerate(ranks, start=1):
        torchrun._note(store, "ended", rank)
        killed(process)
    assert torchrun._killed(store, job) is None


def test_a_rank_that_was_killed(ranks: list[subprocess.Popen[str]], store: Any, job: Job) -> None:
    killed(ranks[1])
    killed_rank = torchrun._killed(store, job)
    assert killed_rank is not None
    assert str(killed_rank.error()) == "rank 2 was killed by SIGKILL (out of memory?)"


@pytest.mark.parametrize(
    ("report", "name"),
    [
        ("Segmentation fault", "SIGSEGV"),
        ("Bus error", "SIGBUS"),
        ("Aborted", "SIGABRT"),
        ("none_dealloc: deallocating None", "SIGABRT"),
    ],
)
def test_a_rank_that_crashed(report: str, name: str, ranks: list[subprocess.Popen[str]], store: Any, job: Job) -> None:
    with rank_log.path(job, 1).open("a", encoding="utf-8") as log:
        log.write(f"training\nFatal Python error: {report}\n\nThread 0x1\n")
    killed(ranks[0])
    killed_rank = torchrun._killed(store, job)
    assert killed_rank is not None
    assert str(killed_rank.error()).startswith(f"rank 1 was killed by {name}, see ")


def test_a_rank_on_another_machine_may_live(ranks: list[subprocess.Popen[str]], store: Any, job: Job) -> None:
    killed(ranks[0])
    store.set("began-1", json.dumps(["another", *json.loads(store.get("began-1"))[1:]]))
    assert torchrun._killed(store, job) is None
