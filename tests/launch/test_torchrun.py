"""A rank that torchrun has started: its number, the failures of other ranks, and restarts."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from hydraloop import UserError
from hydraloop.plan import RunPlan
from hydraloop.processes import rank_log, torchrun
from hydraloop.processes.failure import Failure
from hydraloop.run_files.checkpoint_to_resume import known_checkpoints
from hydraloop.run_files.processes import started

GIVEN = Path("/given.pth")


def plan_in(run_dir: Path, checkpoint: Path | None = GIVEN) -> RunPlan:
    return RunPlan(cfg=OmegaConf.create(), run_dir=run_dir, checkpoint=checkpoint, known=known_checkpoints(run_dir))


def written_by_a_slow_clock(run_dir: Path) -> Path:
    """Write a checkpoint to a file server whose clock is 3 s behind."""
    checkpoint = run_dir / "checkpoints" / "epoch_1.pth"
    checkpoint.parent.mkdir(exist_ok=True)
    torch.save({}, checkpoint)
    os.utime(checkpoint, (time.time() - 3, time.time() - 3))
    return checkpoint


def test_one_process_is_not_several(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not torchrun.is_several()
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    assert not torchrun.is_several()
    assert torchrun.rank() == 0
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert torchrun.is_several()
    assert torchrun.rank() == 1


def test_a_restart_finds_its_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(torchrun, "_connect", lambda: store)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert torchrun.earlier(None) is None, "this is the first start"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert torchrun.earlier(None) is None, "the first start failed before there was a run"
    torchrun.remember(plan_in(tmp_path))
    torchrun.remember(plan_in(tmp_path, None))
    found = torchrun.earlier("auto")
    assert found is not None
    assert found(None) == (tmp_path, GIVEN), "the first start's"
    checkpoint = written_by_a_slow_clock(tmp_path)
    assert found(None) == (tmp_path, checkpoint)


@pytest.mark.parametrize(("kept", "said"), [("True", "kept their store has ended"), ("False", "keeps no store for")])
def test_a_restart_without_the_first_start_s_store_needs_auto(
    kept: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The torchrun of rank 0 keeps the store. When it has ended, the torchrun of the new rank 0 makes another one."""
    monkeypatch.setattr(torchrun, "_connect", dist.HashStore)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", kept)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(UserError, match=said) as caught:
        torchrun.earlier(None)
    assert caught.value.remedy is not None
    assert caught.value.remedy.endswith("resume=auto.")
    assert torchrun.earlier("auto") is None


@pytest.mark.parametrize("agent_keeps_the_store", ["True", "False"])
def test_the_other_ranks_end_when_rank_0_has_only_printed(
    agent_keeps_the_store: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent_keeps_the_store)
    store = dist.HashStore()
    monkeypatch.setattr(torchrun, "_store", lambda: store)
    torchrun.Leader().leave(0)
    assert torchrun.follow() == 0
    assert capsys.readouterr() == ("", "")


def test_rank_0_ends_at_once_after_a_mistake_if_torchrun_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another launcher does not end them, so rank 0 tells them, which takes a second to import torch."""
    store = dist.HashStore()
    monkeypatch.setattr(torchrun, "_store", lambda: store)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    torchrun.Leader().leave(2)
    assert not store.check(["job"])
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    torchrun.Leader().leave(2)
    assert torchrun.follow() == 0


def test_a_restarted_job_continues_from_its_own_newest_checkpoint(tmp_path: Path) -> None:
    plan = plan_in(tmp_path)
    assert plan.restarted().checkpoint == GIVEN
    checkpoint = written_by_a_slow_clock(tmp_path)
    assert plan.restarted().checkpoint == checkpoint
    resumed = plan_in(tmp_path)
    assert resumed.restarted().checkpoint == GIVEN, "an earlier run wrote the checkpoint"
    os.utime(written_by_a_slow_clock(tmp_path), (time.time() - 2, time.time() - 2))
    assert resumed.restarted().checkpoint == checkpoint, "it was written again"


SERVE = """
import sys
import torch.distributed as dist

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_lost_connection_after_the_end_of_torchrun_is_an_interrupt(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SERVE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        store = dist.TCPStore("127.0.0.1", int(launcher.stdout.readline()), is_master=False)
        launcher.kill()
        launcher.wait()
    lost = Failure.of(RuntimeError("gloo: Connection reset by peer"), 0, trained=True)
    assert lost.kind == "lost"
    found = torchrun._cause(store, lost, tmp_path, launcher.pid)
    assert (found.kind, found.number, found.trained) == ("signal", signal.SIGTERM, True)
    own = Failure.of(ValueError("own"), 0)
    assert torchrun._cause(store, own, tmp_path, launcher.pid) == own
    there = os.getppid()
    assert torchrun._cause(store, lost, tmp_path, there) == lost, "torchrun on another machine has ended"


# Ranks that were killed. ----------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("WORLD_SIZE", "3")
    return dist.FileStore(str(tmp_path / "store"), 3)


@pytest.fixture
def ranks(store: Any, tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Start ranks 1 and 2. Their notes are written here, so that they need not import torch."""
    processes = []
    for rank in (1, 2):
        log = rank_log.path(tmp_path, rank)
        log.write_text("Fatal Python error: Aborted\n", encoding="utf-8")  # by an earlier start
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True)
        processes.append(process)
        began = (socket.gethostname(), process.pid, started(process.pid))
        torchrun._note(store, "began", rank, *began, log.stat().st_size)
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def killed(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def test_ranks_that_run_or_have_ended_were_not_killed(
    ranks: list[subprocess.Popen[str]], store: Any, tmp_path: Path
) -> None:
    assert torchrun._killed(store, tmp_path) is None
    for rank, process in enumerate(ranks, start=1):
        torchrun._note(store, "ended", rank)
        killed(process)
    assert torchrun._killed(store, tmp_path) is None


def test_a_rank_that_was_killed(ranks: list[subprocess.Popen[str]], store: Any, tmp_path: Path) -> None:
    killed(ranks[1])
    killed_rank = torchrun._killed(store, tmp_path)
    assert killed_rank is not None
    assert str(killed_rank.error()) == "rank 2 was killed by SIGKILL (out of memory?)"


def test_a_rank_that_crashed(ranks: list[subprocess.Popen[str]], store: Any, tmp_path: Path) -> None:
    with rank_log.path(tmp_path, 1).open("a", encoding="utf-8") as log:
        log.write("training\nFatal Python error: Bus error\n\nThread 0x1\n")
    killed(ranks[0])
    killed_rank = torchrun._killed(store, tmp_path)
    assert killed_rank is not None
    assert str(killed_rank.error()).startswith("rank 1 crashed (Bus error), see ")


def test_a_rank_on_another_machine_may_live(ranks: list[subprocess.Popen[str]], store: Any, tmp_path: Path) -> None:
    killed(ranks[0])
    store.set("began-1", json.dumps(["another", *json.loads(store.get("began-1"))[1:]]))
    assert torchrun._killed(store, tmp_path) is None
