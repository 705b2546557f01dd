"""All ranks do at the same iteration what a hook requests on one rank; a failed rank closes without the others."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hydraloop.data import build_loader
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.hooks import CheckpointHook
from hydraloop.tasks import Regression
from tests.engine.distributed.test_equality import dataset
from tests.helpers import make_engine
from tests.marks import slow
from tests.ranks import RankError, on_ranks


class Asks(Hook):
    """Makes a request at one mount point, on one rank."""

    def __init__(self, rank: int, what: str, at: str, when: int) -> None:
        self.rank, self.what, self.at, self.when = rank, what, at, when

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Any) -> None:
        if self.at == "iteration" and engine.progress.iteration == self.when:
            self._ask(engine)

    def after_train_epoch(self, engine: Engine) -> None:
        if self.at == "epoch" and engine.progress.epoch == self.when:
            self._ask(engine)

    def _ask(self, engine: Engine) -> None:
        if engine.distributed.rank != self.rank:
            return
        if self.what == "stop":
            engine.request_stop("enough")
        elif self.what == "checkpoint":
            engine.request_checkpoint("asked")
        elif self.what == "own":
            engine.request_checkpoint("own", lambda engine: engine.checkpoints.save(engine.run_dir / "own.pth"))
        elif self.what == "fail":
            raise ValueError("on one rank only")


class Counts(Hook):
    """Counts the calls of a hook that fails on another rank."""

    on_error = "disable"

    def __init__(self, fails_on: int) -> None:
        self.fails_on, self.calls = fails_on, 0

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Any) -> None:
        self.calls += 1
        if engine.distributed.rank == self.fails_on and self.calls == 3:
            raise ValueError("on one rank only")


def run(distributed: Distributed, run_dir: str, hooks: dict[str, Hook], accumulate: int = 1) -> dict[str, Any]:
    """Ten epochs of 9 iterations. Return the progress of this rank."""
    torch.manual_seed(0)
    task = Regression(nn.Linear(3, 1), nn.MSELoss())
    part = {"rank": distributed.rank, "world_size": distributed.world_size}
    engine = make_engine(
        Path(run_dir),
        hooks,
        train=build_loader(dataset(36), shuffle=True, batch_size=2, **part),
        val=build_loader(dataset(3), shuffle=False, batch_size=1, **part),
        task=task,
        distributed=distributed,
        max_epochs=10,
        accumulate=accumulate,
    )
    result = engine.train()
    return {
        "status": result.status,
        "reason": result.reason,
        "iteration": engine.progress.iteration,
        "calls": [hook.calls for hook in hooks.values() if isinstance(hook, Counts)],
    }


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stop_asked_for_on_one_rank_inside_an_epoch(rank: int, tmp_path: Path) -> None:
    ends = on_ranks(2, run, str(tmp_path), {"asks": Asks(rank, "stop", "iteration", 3)}, agree_interval=2)
    assert [(end["status"], end["reason"]) for end in ends] == [("stopped", "enough")] * 2
    assert ends[0]["iteration"] == ends[1]["iteration"]
    assert 3 < ends[0]["iteration"] <= 3 + 2 * 2


def test_inside_a_window_a_stop_waits_for_its_end(tmp_path: Path) -> None:
    ends = on_ranks(2, run, str(tmp_path), {"asks": Asks(1, "stop", "iteration", 2)}, 3, agree_interval=1)
    assert [end["iteration"] for end in ends] == [6, 6]


def test_a_stop_asked_for_at_an_epochs_end_is_immediate(tmp_path: Path) -> None:
    ends = on_ranks(2, run, str(tmp_path), {"asks": Asks(1, "stop", "epoch", 2)}, agree_interval=1000)
    assert [(end["iteration"], end["reason"]) for end in ends] == [(18, "enough")] * 2


@pytest.mark.parametrize("at", ["iteration", "epoch"])
def test_a_checkpoint_asked_for_on_one_rank_is_written_by_rank_0(at: str, tmp_path: Path) -> None:
    on_ranks(2, run, str(tmp_path), {"asks": Asks(1, "checkpoint", at, 2)}, agree_interval=3)
    checkpoint = torch.load(tmp_path / "checkpoints" / "asked.pth", weights_only=True)
    assert len(checkpoint["rng"]["other_ranks"]) == 1
    # At iteration 2 it is requested; two exchanges, at most 3 iterations apart, tell the other rank.
    expected = (18,) if at == "epoch" else range(3, 9)
    assert checkpoint["progress"]["iteration"] in expected


def test_a_writer_of_a_hooks_own_waits_for_all_ranks(tmp_path: Path) -> None:
    on_ranks(2, run, str(tmp_path), {"asks": Asks(1, "own", "epoch", 2)})
    assert not (tmp_path / "own.pth").exists()
    hooks = {"one": Asks(1, "own", "epoch", 2), "other": Asks(0, "own", "epoch", 4)}
    on_ranks(2, run, str(tmp_path), hooks)
    assert torch.load(tmp_path / "own.pth", weights_only=True)["progress"]["epoch"] == 4


def test_checkpoints_by_iteration_bear_the_iteration_they_are_of(tmp_path: Path) -> None:
    on_ranks(2, run, str(tmp_path), {"checkpoint": CheckpointHook(interval=7, by_epoch=False, save_last=False)})
    found = sorted(int(path.stem.removeprefix("iter_")) for path in (tmp_path / "checkpoints").glob("*.pth"))
    assert found == list(range(7, 91, 7))


def test_a_hook_that_is_switched_off_on_one_rank_is_switched_off_on_all(tmp_path: Path) -> None:
    ends = on_ranks(2, run, str(tmp_path), {"counts": Counts(fails_on=1)}, agree_interval=2)
    assert ends[1]["calls"] == [3]
    assert 3 <= ends[0]["calls"][0] <= 3 + 2 * 2


def test_a_rank_that_fails_closes_without_the_others(tmp_path: Path) -> None:
    hooks = {"asks": Asks(1, "fail", "iteration", 3), "closing": Closing()}
    with pytest.raises(RankError, match=r"(?s)rank 1.*on one rank only"):
        on_ranks(2, run, str(tmp_path), hooks)
    assert (tmp_path / "closed_1").read_text() == "[1]"


class Closing(Hook):
    """Calls a collective while closing, which a hook should not do."""

    def after_train(self, engine: Engine) -> None:
        told = engine.distributed.gather(engine.distributed.rank)
        (engine.run_dir / f"closed_{engine.distributed.rank}").write_text(str(told))


def late(distributed: Distributed) -> tuple[float, str]:
    """Rank 1 is 3 s late for the hosts, then for the devices. Return how long the devices waited, and the error."""
    model = torch.nn.Linear(4, 1)
    distributed.prepare(model)
    forward = distributed.wrap(Regression(model, torch.nn.functional.mse_loss))
    batch = torch.ones(2, 4), torch.zeros(2, 1)
    forward(batch)["loss"].backward()
    distributed.lower_timeout()
    time.sleep(3 * distributed.rank)
    distributed.barrier()
    time.sleep(3 * distributed.rank)
    start = time.monotonic()
    try:
        forward(batch)["loss"].backward()
    except RuntimeError as error:
        distributed.abandon(error)
        return time.monotonic() - start, str(error)
    return time.monotonic() - start, ""


@pytest.mark.parametrize("strategy", ["ddp", slow("fsdp2")])
def test_a_rank_that_hangs_is_noticed_sooner_after_the_first_iteration(strategy: str) -> None:
    options = {"strategy": strategy, "timeout": 60.0, "find_unused_parameters": True}
    waited, said = on_ranks(2, late, train_timeout=1.0, **options)[0]
    assert "timeout" in said or "Timed out" in said
    assert 0.5 < waited < 2.5
    for _, said in on_ranks(2, late, train_timeout=None, **options):
        assert said == ""
