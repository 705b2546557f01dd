"""`evaluate` and `export` on a run that several processes have trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hydraloop
from hydraloop.commands import evaluate, export, parser
from hydraloop.commands.on_ranks import RankCommand
from hydraloop.engine.distributed.comm import Distributed
from tests.config.composed import REPOSITORY
from tests.ranks import on_ranks


def train_digits(distributed: Distributed, run_dir: Path) -> None:
    lines = ["engine.device=cpu", "engine.max_epochs=1", "engine.limit_train_batches=2", "data.val=null"]
    cfg = hydraloop.compose(lines, folder=REPOSITORY)
    hydraloop.build(cfg, run_dir=run_dir, distributed=distributed).train()


def prepared(*words: str) -> RankCommand:
    args = parser.read(words)
    given, overrides = parser.split(args)
    return (export if words[0] == "export" else evaluate).prepare(args, given, overrides)


def evaluated(distributed: Distributed, run_dir: Path) -> str:
    return prepared("evaluate", str(run_dir)).run(distributed)


@pytest.mark.slow  # 2 ranks
def test_a_run_of_a_launcher_is_evaluated_with_as_many_processes(tmp_path: Path) -> None:
    """Its config does not say how many there were; the checkpoint does."""
    run_dir = tmp_path / "run"
    on_ranks(2, train_digits, run_dir)
    command = prepared("evaluate", str(run_dir))
    assert (command.processes, command.trained_by) == (2, 2)
    expected = json.loads((run_dir / "result.json").read_text(encoding="utf-8"))["test_metrics"]
    assert json.loads(on_ranks(2, evaluated, run_dir)[0]) == expected
    assert prepared("evaluate", str(run_dir), "distributed.nproc_per_node=1").processes == 1
    assert prepared("export", str(run_dir), "--format", "pt2", "output=model.pt2").processes == 1
