"""The contrastive example on two ranks: the same weights as one process with the whole batches."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hydraloop.data import build_loader
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.run_parts import Settings
from tests.e2e.projects import REPOSITORY
from tests.helpers import EngineWithNeededHooks
from tests.ranks import on_ranks

BATCH = 8


class Pairs(list[Any]):
    """Vectors `[3]`, the same a little changed, and a class."""

    def __init__(self) -> None:
        values = torch.randn(3 * BATCH, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        super().__init__((value, value + 0.1 * noise, 0) for value, noise in values)


def trained(distributed: Distributed, run_dir: Path) -> dict[str, Tensor]:
    sys.path.insert(0, str(REPOSITORY / "examples" / "contrastive"))
    try:
        from views import Contrastive  # type: ignore[import-not-found]
    finally:
        sys.path.pop(0)
    torch.manual_seed(0)
    task = Contrastive(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4)).double())
    ranks: Any = {"rank": distributed.rank, "world_size": distributed.world_size}
    loader = build_loader(Pairs(), batch_size=BATCH // distributed.world_size, shuffle=True, seed=1, **ranks)
    (own := run_dir / str(distributed.rank)).mkdir(exist_ok=True)
    EngineWithNeededHooks(
        task=task,
        optimizer=torch.optim.SGD(task.parameters(), lr=0.5),
        loaders=Loaders(loader, None, None),
        settings=Settings(device="cpu", max_epochs=2),
        run_dir=own,
        distributed=distributed,
    ).train()
    return dict(task.model.state_dict())


def test_two_ranks_train_as_one_process(tmp_path: Path) -> None:
    one = trained(Distributed(), tmp_path)
    for two in on_ranks(2, trained, tmp_path):
        torch.testing.assert_close(two, one, rtol=1e-9, atol=1e-12)
