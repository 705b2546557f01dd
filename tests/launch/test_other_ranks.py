"""What ranks tell each other: the plan, the values that must be equal, errors, and where a restarted run continues."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from hydraloop import UserError
from hydraloop.errors import PeerError
from hydraloop.files.checkpoint_to_resume import known_checkpoints
from hydraloop.launch import torchrun
from hydraloop.launch.failure import Failure
from hydraloop.launch.other_ranks import Peers
from hydraloop.launch.plan import RunPlan
from tests.e2e.projects import REPOSITORY

GIVEN = Path("/given.pth")


def test_a_rank_whose_launcher_was_killed_before_the_rank_could_ask_for_it_ends(tmp_path: Path) -> None:
    """It would try for half an hour to reach the store, which was the launcher's."""
    with subprocess.Popen(["true"]) as launcher:
        launcher.wait()
    (tmp_path / "folder").mkdir()
    variables = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "x",
        torchrun.NODE: str(tmp_path / "folder"),
        torchrun.OWNER: str(launcher.pid),
    }
    command = [sys.executable, "train.py", f"hydra.run.dir={tmp_path}/run"]
    done = subprocess.run(command, env={**os.environ, **variables}, cwd=REPOSITORY, timeout=30, capture_output=True)
    assert done.returncode == 1
    assert [path.name for path in tmp_path.iterdir()] == []


STORE = """
import time
from torch.distributed import TCPStore
store = TCPStore("localhost", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(60)
"""


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The store of two ranks."""
    found = dist.HashStore()
    found.set_timeout(torchrun._WAIT)
    monkeypatch.setattr(torchrun, "connect", lambda: found)
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "2")
    be(0, monkeypatch)
    return found


def be(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", str(rank))


def config(**values: Any) -> DictConfig:
    """A config with the node `hydra`."""
    hydra = {"mode": None, "run": {"dir": "a"}, "runtime": {"output_dir": "???"}, "output_subdir": None}
    return OmegaConf.create({"hydra": hydra, **values})


def planned(cfg: DictConfig, run_dir: Path) -> RunPlan:
    return RunPlan(cfg=OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"]), run_dir=run_dir)


def exchange(ours: DictConfig, theirs: DictConfig, monkeypatch: pytest.MonkeyPatch) -> RunPlan:
    """Let rank 0 have one config, and rank 1 another. Returns the plan of rank 1."""
    peers, errors = Peers(), list[BaseException]()

    def lead() -> None:
        try:
            peers.send_plan(ours, planned(ours, Path("/run")))
        except UserError as error:
            errors.append(error)

    leader = threading.Thread(target=lead)
    leader.start()
    while leader.is_alive() and not peers._has_plan:
        time.sleep(0.01)
    be(1, monkeypatch)
    other = Peers()
    try:
        return other.receive_plan(theirs, lambda plan: planned(theirs, plan.run_dir))
    except UserError as error:
        other.report_failure(Failure.of(error, 1))
        leader.join()
        raise errors[0] from error  # rank 0 reports it
    finally:
        leader.join()


@pytest.mark.usefixtures("store")
def test_the_other_ranks_take_directory_time_and_run_id_from_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    number = iter(range(100))
    OmegaConf.register_new_resolver("run_id", lambda: next(number), use_cache=True, replace=True)
    ours, theirs = (config(tag="${run_id:}", again="${run_id:}", api_key=key) for key in ("hunter2", "hunter3"))
    assert theirs.tag == 0
    theirs.hydra.run.dir = "/run"
    plan = exchange(ours, theirs, monkeypatch)
    assert (plan.run_dir, plan.cfg.tag, plan.cfg.again) == (Path("/run"), 1, 1)
    assert plan.cfg.api_key == "hunter3", "each rank has its own secrets"
    assert theirs.hydra.run.dir == "a", "the value of ${hydra:run.dir} is that of rank 0"


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(("ours", "theirs", "key"), [({"a": [1]}, {"a": [2]}, "a.0"), ({}, {"b": {"c": 1}}, "b.c")])
def test_what_differs_is_named(
    ours: dict[str, Any], theirs: dict[str, Any], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="rank 1 has another value than rank 0") as caught:
        exchange(config(seed=1, **ours), config(seed=1, **theirs), monkeypatch)
    assert caught.value.key == key


def test_the_other_ranks_end_when_rank_0_has_failed(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    error = UserError("no", key="k")
    Peers().report_error(error)
    be(1, monkeypatch)
    with pytest.raises(PeerError):
        Peers().receive_plan(config(), lambda plan: plan)


def test_a_restarted_rank_reads_no_plan_of_the_start_before(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    Peers().report_error(RuntimeError("x"))
    assert torchrun.of_this_start(store).check(["plan"])
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not torchrun.of_this_start(store).check(["plan"])


# Restarts. -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def kept(store: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """The launcher keeps the store. Returns a function that sets the number of the restart."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return lambda number: monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", number)


def plan_in(run_dir: Path, checkpoint: Path | None = GIVEN) -> RunPlan:
    return RunPlan(
        cfg=OmegaConf.create(), run_dir=run_dir, checkpoint=checkpoint, known_checkpoints=known_checkpoints(run_dir)
    )


def written_by_a_slow_clock(run_dir: Path) -> Path:
    """Write a checkpoint to a file server whose clock is 3 s behind."""
    checkpoint = run_dir / "checkpoints" / "epoch_1.pth"
    checkpoint.parent.mkdir(exist_ok=True)
    torch.save({}, checkpoint)
    os.utime(checkpoint, (time.time() - 3, time.time() - 3))
    return checkpoint


def test_a_restart_finds_its_run(kept: Callable[[str], None], tmp_path: Path) -> None:
    peers = Peers()
    kept("0")
    assert peers.restart_point(None) is None, "this is the first start"
    kept("1")
    assert peers.restart_point(None) is None, "the first start failed before there was a run"
    peers.record_start(plan_in(tmp_path))
    peers.record_start(plan_in(tmp_path, None))
    found = peers.restart_point("auto")
    assert found is not None
    assert found(None) == (tmp_path, GIVEN), "the first start's"
    checkpoint = written_by_a_slow_clock(tmp_path)
    assert found(None) == (tmp_path, checkpoint)


def test_a_restart_ignores_checkpoints_from_before_until_they_are_written_again(
    kept: Callable[[str], None], tmp_path: Path
) -> None:
    checkpoint = written_by_a_slow_clock(tmp_path)
    peers = Peers()
    peers.record_start(plan_in(tmp_path))
    kept("1")
    found = peers.restart_point(None)
    assert found is not None
    assert found(None) == (tmp_path, GIVEN)
    os.utime(written_by_a_slow_clock(tmp_path), (time.time() - 2, time.time() - 2))
    assert found(None) == (tmp_path, checkpoint)


def test_a_restart_without_a_store_needs_auto(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(UserError, match="keeps no store"):
        Peers().restart_point(None)
    assert Peers().restart_point("auto") is None
