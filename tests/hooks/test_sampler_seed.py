"""DistSamplerSeedHook on real runs: the order of samples, epoch by epoch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from hydraloop.data import build_loader
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.hooks.checkpoint import CheckpointHook
from hydraloop.hooks.epoch_start import DistSamplerSeedHook
from tests.hooks.tiny_runs import Stopper, engine_of
from tests.ranks import on_ranks


def data(samples: int = 8) -> TensorDataset:
    """Samples whose first input is their number."""
    inputs = torch.zeros(samples, 3)
    inputs[:, 0] = torch.arange(samples)
    return TensorDataset(inputs, torch.zeros(samples, 2))


class Orders(Hook):
    """The numbers of the samples, in the order they came, by epoch."""

    def __init__(self) -> None:
        self.epochs: dict[int, list[int]] = {}

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        self.epochs.setdefault(engine.progress.epoch, []).extend(batch[0][:, 0].int().tolist())


def orders(run_dir: Path, loader: Any, *, hook: bool = True, **settings: Any) -> dict[int, list[int]]:
    seen = Orders()
    engine_of(
        run_dir, {"sampler_seed": DistSamplerSeedHook() if hook else None, "orders": seen}, train=loader, **settings
    ).train()
    return seen.epochs


def distributed(rank: int) -> DistributedSampler[Any]:
    return DistributedSampler(data(), num_replicas=2, rank=rank, shuffle=True, seed=3)


def test_torchs_distributed_sampler_shuffles_anew_and_ranks_share_the_samples(tmp_path: Path) -> None:
    ranks = [orders(tmp_path, DataLoader(data(), batch_size=2, sampler=distributed(rank))) for rank in (0, 1)]
    for epoch in range(3):
        assert sorted(ranks[0][epoch] + ranks[1][epoch]) == list(range(8))
    assert len({tuple(ranks[0][epoch]) for epoch in range(3)}) == 3


def test_without_the_hook_every_epoch_is_the_same(tmp_path: Path) -> None:
    seen = orders(tmp_path, DataLoader(data(), batch_size=2, sampler=distributed(0)), hook=False)
    assert seen[0] == seen[1] == seen[2]


def test_the_sampler_of_a_batch_sampler_gets_the_epoch(tmp_path: Path) -> None:
    batch_sampler = BatchSampler(distributed(0), batch_size=2, drop_last=False)
    seen = orders(tmp_path, DataLoader(data(), batch_sampler=batch_sampler))
    plain = orders(tmp_path, DataLoader(data(), batch_size=2, sampler=distributed(0)))
    assert seen == plain


def test_a_resumed_run_continues_with_its_order(tmp_path: Path) -> None:
    def loader() -> Any:
        return build_loader(data(), shuffle=True, seed=1, batch_size=2)

    def train(stop_at: int = 0, **settings: Any) -> dict[int, list[int]]:
        seen = Orders()
        hooks = {
            "sampler_seed": DistSamplerSeedHook(),
            "orders": seen,
            "stopper": Stopper(stop_at=stop_at),
            "checkpoint": CheckpointHook(interval=None),
        }
        engine_of(tmp_path, hooks, train=loader(), **settings).train()
        return seen.epochs

    first = train(stop_at=6)
    second = train(resume=tmp_path / "checkpoints" / "iter_6.pth")
    assert first[1] + second[1] == orders(tmp_path, loader())[1]


def orders_of_rank(distributed: Distributed, run_dir: str) -> dict[int, list[int]]:
    """The samples of this rank in a run of all ranks."""
    rank, ranks = distributed.rank, distributed.world_size
    loader = build_loader(data(), shuffle=True, seed=1, batch_size=2, rank=rank, world_size=ranks)
    return orders(Path(run_dir), loader, val=False, distributed=distributed)


def test_real_ranks_shuffle_anew_together(tmp_path: Path) -> None:
    first, second = on_ranks(2, orders_of_rank, str(tmp_path))
    for epoch in range(3):
        assert sorted(first[epoch] + second[epoch]) == list(range(8)), "each sample once"
    for seen in (first, second):
        assert len({tuple(order) for order in seen.values()}) == 3


def test_loaders_without_such_a_sampler_are_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    assert orders(tmp_path, DataLoader(data(), batch_size=2))[2] == list(range(8))
    assert orders(tmp_path, [(torch.ones(2, 3), torch.zeros(2, 2))], max_epochs=1)[0] == [1, 1]
