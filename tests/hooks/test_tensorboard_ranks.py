"""TensorBoardLoggerHook on several ranks: rank 0's shard is counted, without waiting for other ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.loaders import Loaders
from hydraloop.tasks import Regression
from tests.hooks.test_tensorboard import Counting
from tests.hooks.tiny_runs import engine_of
from tests.ranks import on_ranks


def train(distributed: Distributed, run_dir: str) -> None:
    """Two steps of a model of 15 + 5 + 5 + 1 parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    distributed.prepare(model)
    engine_of(
        Path(run_dir),
        {"tensorboard": Counting(histograms=2)},
        task=Regression(model, nn.MSELoss()),
        loaders=Loaders([(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(2)]),
        distributed=distributed,
        max_epochs=1,
    ).train()


@pytest.mark.parametrize(("strategy", "rows"), [("ddp", 5), ("fsdp2", 3)])
def test_rank_0_counts_what_it_has(tmp_path: Path, strategy: str, rows: int) -> None:
    on_ranks(2, train, str(tmp_path), strategy=strategy)
    (path,) = (tmp_path / "media" / "train").iterdir()
    found = json.loads(path.read_text())
    assert path.name == "parameters_iter_2.json"
    for kind in ("weights", "gradients"):
        counted = {name: facts["num"] for name, facts in found.items() if name.startswith(kind)}
        assert counted == {
            f"{kind}/0.weight": 3 * rows,
            f"{kind}/0.bias": rows,
            f"{kind}/2.weight": 5,
            f"{kind}/2.bias": 1,
        }
