"""What a rank of torchrun's knows of its place, and of the run before a restart."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from hydraloop.launch import torchrun
from hydraloop.launch.failure import Failure
from hydraloop.launch.job import Job

GIVEN = Path("/given.pth")


def job_in(run_dir: Path, began: float) -> Job:
    return Job(config="{}", run_dir=str(run_dir), checkpoint=str(GIVEN), began=began)


def test_one_process_is_not_several(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not torchrun.is_several()
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    assert not torchrun.is_several()
    assert torchrun.rank() == 0
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert torchrun.is_several()
    assert torchrun.rank() == 1


def test_a_restart_finds_its_run_and_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    mine, other = tmp_path / "day" / "mine", tmp_path / "day" / "other"
    for run_dir in (mine, other):
        (run_dir / ".hydra").mkdir(parents=True)
        torchrun.record(run_dir, GIVEN, began=time.time())
    record = other / ".hydra" / "launch.json"
    noted = json.loads(record.read_text())
    noted["launcher"]["process"] = "another"
    record.write_text(json.dumps(noted))
    pattern = str(tmp_path / "*" / "*")
    assert torchrun.earlier(pattern) is None, "the first start has none before it"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    found = torchrun.earlier(pattern)
    assert found is not None
    assert found.run_dir == mine
    assert found.resumed().checkpoint == GIVEN
    torchrun.record(mine, GIVEN, began=0.0)
    assert torchrun.earlier(pattern) == found, "the first start's record stays"
    assert torchrun.earlier(str(tmp_path / "elsewhere")) is None


def test_a_rank_that_moved_is_known_by_the_users_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job7")
    torchrun.record(tmp_path, GIVEN, began=1.0)
    record = tmp_path / ".hydra" / "launch.json"
    noted = json.loads(record.read_text())
    noted["launcher"].update(host="another", process="another")
    record.write_text(json.dumps(noted))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert torchrun.earlier(str(tmp_path)) is not None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job8")
    assert torchrun.earlier(str(tmp_path)) is None


def test_a_restarted_job_goes_on_from_its_own_newest_checkpoint(tmp_path: Path) -> None:
    job = job_in(tmp_path, time.time() - 100)
    assert job.restarted().checkpoint == str(GIVEN)
    checkpoint = tmp_path / "checkpoints" / "epoch_1.pth"
    checkpoint.parent.mkdir()
    checkpoint.write_bytes(b"")
    assert Job.from_json(job.to_json()) == job
    os.utime(checkpoint, (0, 0))
    assert job.restarted().checkpoint == str(GIVEN), "an earlier run's"


SERVE = """
import sys
import torch.distributed as dist

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def test_a_rank_that_lost_others_when_torchrun_had_gone_was_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SERVE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        store = dist.TCPStore("127.0.0.1", int(launcher.stdout.readline()), is_master=False)
        launcher.kill()
        launcher.wait()
    lost = Failure.of(RuntimeError("gloo: Connection reset by peer"), 0, trained=True)
    assert lost.kind == "lost"
    found = torchrun._cause(store, lost, job_in(tmp_path, 0.0), launcher.pid)
    assert (found.kind, found.number, found.trained) == ("signal", signal.SIGTERM, True)
    own = Failure.of(ValueError("own"), 0)
    assert torchrun._cause(store, own, job_in(tmp_path, 0.0), launcher.pid) == own
    there = os.getppid()
    assert torchrun._cause(store, lost, job_in(tmp_path, 0.0), there) == lost, "a torchrun on another machine has gone"
