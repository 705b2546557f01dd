"""A run that continues on another number of ranks has the same global batches, and the same weights."""

from __future__ import annotations

import contextlib
import json
import math
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import hydraloop
from hydraloop import build
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.errors import UserError
from tests.config.composed import REPOSITORY
from tests.e2e.projects import Run
from tests.faults.comparison import ledger
from tests.faults.harness import make, seen, wait
from tests.ranks import on_ranks

LINE = (
    "engine.device=cpu", "engine.max_epochs=2", "engine.accumulate=3", "engine.val_interval=null", "engine.test=false",
    "experiment=diabetes", "task.model.dropout=0.0", "data.loader.batch_size=25", "optimizer=sgd", "optimizer.lr=1e-5",
    "default_hooks.progress=null", "scheduler=[]",
    "default_hooks.checkpoint.by_epoch=false", "default_hooks.checkpoint.interval=1", "default_hooks.logger.interval=7",
)  # fmt: skip
Part = tuple[dict[int, list[int]], dict[str, torch.Tensor]]


class _KilledError(Exception):
    """The end of an attempt."""


class _Ledger(hydraloop.Hook):
    """Notes the samples of each iteration on this rank, and ends the attempt."""

    def __init__(self, until: int) -> None:
        self.until, self.seen = until, dict[int, list[int]]()

    def after_train_iter(self, engine: hydraloop.Engine, batch_idx: int, batch: Any, outputs: Any) -> None:
        loader: Any = engine.loaders.train
        mine = loader.samples_at(batch_idx)[0]
        self.seen[engine.progress.iteration] = loader.indices_at(batch_idx, loader.epoch)[:mine]
        assert len(batch[0]) == mine or mine == 0
        if engine.progress.iteration == self.until:
            raise _KilledError


def attempt(distributed: Distributed, run_dir: str, until: int, *overrides: str) -> Part:
    """Train up to an iteration. Returns the samples of this rank, and the weights."""
    cfg = hydraloop.compose([*LINE, *overrides], folder=REPOSITORY)
    ledger = _Ledger(until)
    engine = build(cfg, run_dir=Path(run_dir), distributed=distributed, hooks={"ledger": ledger})
    with contextlib.suppress(_KilledError):
        engine.train()
    return ledger.seen, dict(engine.model.state_dict())


def joined(parts: list[Part], ledger: dict[int, list[int]]) -> dict[str, torch.Tensor]:
    """Add what all ranks saw in an attempt, in rank order; an iteration that was done again counts once."""
    for iteration in parts[0][0]:
        ledger[iteration] = [sample for seen, _ in parts for sample in seen[iteration]]
    return parts[0][1]


def losses(run_dir: Path) -> dict[int, float]:
    """Return the losses of the records by iteration."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {line["iteration"]: line["loss"] for line in lines if line["mode"] == "train"}


@pytest.mark.slow
def test_one_two_three_and_one_ranks_see_the_batches_of_one(tmp_path: Path) -> None:
    whole: dict[int, list[int]] = {}
    expected = joined(on_ranks(1, attempt, str(tmp_path / "whole"), 99), whole)
    assert len(whole) > 20
    found: dict[int, list[int]] = {}
    run_dir, resume = str(tmp_path / "run"), ()
    for ranks, until in ((1, 5), (2, 11), (3, 20), (1, 99)):
        weights = joined(on_ranks(ranks, attempt, run_dir, until, *resume), found)
        resume = (f"resume={run_dir}",)
    assert found == whole
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=1e-6)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6)


@pytest.mark.nightly
def test_two_ranks_of_which_one_got_sigterm_continue_as_three(tmp_path: Path) -> None:
    """Each of 20 batches has 8 samples, so that no rank's batch norm gets a single one."""
    project = make(tmp_path / "project")
    line = ("experiment=faults", "resume=auto", "data.train.samples=80", "distributed.agree_interval=1")
    assert project.train(*line, "hydra.run.dir=whole").code == 0
    run, two = Run(project.path / "run"), (*line, "hydra.run.dir=run", "data.loader.batch_size=4")
    script = project.begin(*two, "distributed.nproc_per_node=2")
    wait(script, lambda: seen(run.path / "witness").count("iteration") > 2, "training has not begun")
    (rank,) = [child for child in psutil.Process(script.pid).children() if child.environ().get("RANK") == "1"]
    rank.send_signal(signal.SIGTERM)
    output = script.communicate()[0]
    assert script.returncode == 75, output
    assert run.result["reason"] == "preempted by SIGTERM"
    assert 2 < run.result["progress"]["iteration"] < 20
    resumed = project.train(*two, "distributed.nproc_per_node=3")
    assert resumed.code == 0, resumed.text
    assert "resumed from " in resumed.out, resumed.text
    found = samples(run)
    assert len(found) == 20
    assert found == samples(Run(project.path / "whole"))
    assert {line["rank"] for line in ledger(run).values()} == {0, 1, 2}


def samples(run: Run, *, alone_from: float = math.inf) -> dict[int, list[int]]:
    """Return the samples of each iteration, in rank order.

    Args:
        alone_from: after this iteration, only those of rank 0: another rank was there before the restart only.
    """
    found = defaultdict[int, list[int]](list)
    for line in sorted(ledger(run).values(), key=lambda line: (line["iteration"], line["rank"])):
        if line["rank"] == 0 or line["iteration"] <= alone_from:
            found[line["iteration"]] += line["samples"]
    return found


def test_another_global_batch_inside_an_epoch_is_refused(tmp_path: Path) -> None:
    attempt(Distributed(), str(tmp_path), 5)
    with pytest.raises(UserError, match="inside an epoch of batches of 25 samples") as caught:
        attempt(Distributed(), str(tmp_path), 99, f"resume={tmp_path}", "data.loader.batch_size=50")
    assert caught.value.remedy.startswith("Use data.loader.batch_size=25, or")
