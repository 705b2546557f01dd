"""A run continues on another number of ranks, and with another batch size: no sample of the epoch is left out."""

from __future__ import annotations

import contextlib
import math
import signal
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import psutil
import pytest

import hydraloop
from hydraloop import build
from hydraloop.engine.distributed.comm import Distributed
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
Seen = dict[int, tuple[int, list[int]]]


class _KilledError(Exception):
    """The end of an attempt."""


class _Ledger(hydraloop.Hook):
    """Notes the epoch and the samples of each iteration on this rank, and ends the attempt."""

    def __init__(self, until: int) -> None:
        self.until, self.seen = until, Seen()

    def after_train_iter(self, engine: hydraloop.Engine, batch_idx: int, batch: Any, outputs: Any) -> None:
        loader: Any = engine.loaders.train
        mine = loader.samples_at(batch_idx)[0]
        self.seen[engine.progress.iteration] = loader.epoch, loader.indices_at(batch_idx, loader.epoch)[:mine]
        assert len(batch[0]) == mine or mine == 0
        if engine.progress.iteration == self.until:
            raise _KilledError


def attempt(distributed: Distributed, run_dir: str, until: int, *overrides: str) -> Seen:
    """Train up to an iteration. Return what this rank saw."""
    cfg = hydraloop.compose([*LINE, *overrides], folder=REPOSITORY)
    ledger = _Ledger(until)
    engine = build(cfg, run_dir=Path(run_dir), distributed=distributed, hooks={"ledger": ledger})
    with contextlib.suppress(_KilledError):
        engine.train()
    return ledger.seen


@pytest.mark.parametrize(("ranks", "batch_size"), [(2, 25), (1, 9)])
def test_an_epoch_continues_with_the_batch_of_the_config(
    ranks: int, batch_size: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first attempt ends in iteration 5, after the checkpoint of iteration 3."""
    before = on_ranks(ranks, attempt, str(tmp_path), 5, f"data.loader.batch_size={batch_size}")
    caplog.set_level("INFO")
    after = attempt(Distributed(), str(tmp_path), 99, f"resume={tmp_path}")
    assert min(after) == 4
    epochs = [Counter[int](), Counter[int]()]
    for epoch, samples in (*(rank[at] for rank in before for at in (1, 2, 3)), *after.values()):
        epochs[epoch].update(samples)
    sizes = [len(samples) for _, samples in after.values()]
    assert max(sizes) == 25
    assert sizes.count(25) >= len(sizes) - 2, "all but the last batches of two epochs"
    assert {*epochs[1].values()} == {1}
    assert epochs[0].keys() == epochs[1].keys()
    seen = 3 * ranks * batch_size
    assert epochs[0].total() - epochs[1].total() == seen % 25
    assert f"a global batch has 25 samples, and had {ranks * batch_size} in the checkpoint" in caplog.text
    assert f"the epoch continues at batch {seen // 25 + 1}, and at most one batch is repeated" in caplog.text


@pytest.mark.nightly
def test_two_ranks_of_which_one_got_sigterm_continue_as_three(tmp_path: Path) -> None:
    project = make(tmp_path / "project")
    line = ("experiment=faults", "resume=auto", "data.train.samples=80", "distributed.agree_interval=1")
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
    assert_covered(found, epochs=2, samples=80, repeated=12)
    assert {line["rank"] for line in ledger(run).values()} == {0, 1, 2}


def assert_covered(found: dict[int, list[int]], *, epochs: int, samples: int, repeated: int) -> None:
    """Each sample was seen in each epoch, and at most this many of them once more."""
    counts = Counter(sample for batch in found.values() for sample in batch)
    assert counts.keys() == {*range(samples)}
    assert min(counts.values()) == epochs
    assert counts.total() <= epochs * samples + repeated


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
