"""`sync_norm` and `sync_buffers` with `ema`: the averages of statistics, which are what is evaluated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.distributed.fsdp import whole
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import Loaders
from hydraloop.hooks import CheckpointHook, EMAHook, SyncBuffersHook
from hydraloop.tasks import Regression
from tests.hooks.tiny_runs import engine_of, load
from tests.ranks import on_ranks

MEAN, VAR = "1.running_mean", "1.running_var"
Weights = dict[str, Tensor]


class Averages(Hook):
    """The averages before and after the other hooks, and the model's tensors in evaluations."""

    def __init__(self, ema: EMAHook, seen: dict[str, Weights]) -> None:
        self._ema, self._seen = ema, seen

    def _look(self, point: str) -> None:
        averages = self._ema.state_dict()["averaged"].items()
        self._seen[f"{point} {self.name}"] = {name: whole(value).clone() for name, value in averages}

    def after_train_epoch(self, engine: Engine) -> None:
        self._look(f"epoch {engine.progress.epoch}")

    def before_val(self, engine: Engine) -> None:
        self._look(f"val {engine.progress.epoch}")

    def before_test(self, engine: Engine) -> None:
        self._look("test")

    def before_val_iter(self, engine: Engine, batch_idx: int, batch: Any) -> None:
        state = engine.model.state_dict().items()
        self._seen[f"evaluated {engine.progress.epoch}"] = {name: whole(value).clone() for name, value in state}

    def before_test_iter(self, engine: Engine, batch_idx: int, batch: Any) -> None:
        self._seen["tested"] = {name: whole(value).clone() for name, value in engine.model.state_dict().items()}


class FirstAverages(Averages):
    """Before all others."""

    priority = 0


class LastAverages(Averages):
    """After all others."""

    priority = 100


def with_ema(
    distributed: Distributed, run_dir: str, order: list[str], options: dict[str, Any], settings: dict[str, Any]
) -> tuple[dict[str, Weights], dict[str, float], Tensor]:
    """Averages by mount point, the metrics, and the raw statistics at the end, of ranks with different data."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    distributed.prepare(net)
    generator = torch.Generator().manual_seed(distributed.rank)
    train = [(torch.randn(4, 3, generator=generator) + 3 * distributed.rank, torch.ones(4, 1)) for _ in range(4)]
    seen: dict[str, Weights] = {}
    ema = EMAHook(**{"update_buffers": True, "momentum": 0.3, "warmup": False, **options})
    made = {"ema": ema, "sync_norm": SyncBuffersHook(norm_only=True), "sync_buffers": SyncBuffersHook()}
    best = "loss" if settings.get("val_interval", 1) else None
    watching: dict[str, Hook] = {"first": FirstAverages(ema, seen), "last": LastAverages(ema, seen)}
    engine = engine_of(
        Path(run_dir),
        {**watching, **{name: made[name] for name in order}, "checkpoint": CheckpointHook(save_best=best)},
        task=Regression(net, nn.MSELoss()),
        loaders=Loaders(train, *[[(torch.ones(4, 3), torch.ones(4, 1))]] * 2),
        distributed=distributed,
        **{"max_epochs": 2, **settings},
    )
    engine.train()
    return seen, engine.metrics, net.state_dict()[MEAN].clone()


def assert_mean_of_averages(zero: dict[str, Weights], one: dict[str, Weights], before: str, after: str) -> None:
    """The ranks' averages of the statistics differed; both ranks now have the mean."""
    for name in (MEAN, VAR):
        assert not torch.allclose(zero[before][name], one[before][name])
        mean = (zero[before][name].double() + one[before][name].double()) / 2
        torch.testing.assert_close(zero[after][name], mean.float())
        assert torch.equal(zero[after][name], one[after][name])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_averages_of_statistics_are_those_of_all_ranks_when_they_are_evaluated(strategy: str, tmp_path: Path) -> None:
    order = ["ema", "sync_norm"]
    (zero, metrics, raw), (one, others, same) = on_ranks(
        2, with_ema, str(tmp_path), order, {}, {"test": False}, strategy=strategy
    )
    for epoch in (1, 2):
        assert_mean_of_averages(zero, one, f"val {epoch} first", f"val {epoch} last")
        assert torch.equal(zero[f"evaluated {epoch}"][MEAN], zero[f"val {epoch} last"][MEAN])
        assert torch.equal(zero[f"evaluated {epoch}"]["0.weight"], zero[f"val {epoch} first"]["0.weight"])
    assert metrics == others
    assert torch.equal(raw, same), "the model has its own values after the validation"
    (best,) = (tmp_path / "checkpoints").glob("best_*.pth")
    checkpoint = load(best)
    saved = zero[f"val {checkpoint['meta']['epoch']} last"]
    assert torch.equal(checkpoint["hooks"]["ema"]["averaged"][MEAN], saved[MEAN])


def test_averages_are_those_of_all_ranks_in_a_test_without_a_validation(tmp_path: Path) -> None:
    settings = {"val_interval": None, "max_epochs": 1}
    (zero, *_), (one, *_) = on_ranks(2, with_ema, str(tmp_path), ["ema", "sync_norm"], {}, settings)
    assert_mean_of_averages(zero, one, "test first", "test last")
    assert torch.equal(zero["tested"][MEAN], zero["test last"][MEAN])


def test_before_the_first_update_there_is_nothing_to_average(tmp_path: Path) -> None:
    ranks = on_ranks(2, with_ema, str(tmp_path), ["ema", "sync_norm"], {"begin_epoch": 2}, {"test": False})
    for seen, *_ in ranks:
        assert seen["val 1 last"] == {}
        assert torch.equal(seen["evaluated 1"][MEAN], ranks[0][0]["evaluated 1"][MEAN])
    assert_mean_of_averages(ranks[0][0], ranks[1][0], "val 2 first", "val 2 last")


@pytest.mark.parametrize("options", [{"by_epoch": True}, {}], ids=str)
def test_sync_buffers_and_ema_in_either_order_come_to_the_same(options: dict[str, Any], tmp_path: Path) -> None:
    runs = []
    for order in (["sync_buffers", "ema"], ["ema", "sync_buffers"]):
        settings = {"test": False}
        (zero, metrics, _), (one, others, _) = on_ranks(2, with_ema, str(tmp_path), order, options, settings)
        assert metrics == others
        for epoch in (1, 2):
            last = [seen[f"epoch {epoch} last"] for seen in (zero, one)]
            assert torch.equal(last[0][MEAN], last[1][MEAN])
            saved = load(tmp_path / "checkpoints" / f"epoch_{epoch}.pth")["hooks"]["ema"]["averaged"]
            assert torch.equal(saved[MEAN], last[0][MEAN]), "before the checkpoint is written"
        if not options:
            assert_mean_of_averages(zero, one, "epoch 2 first", "epoch 2 last")
        runs.append(zero)
        (tmp_path / "checkpoints").rename(tmp_path / "-".join(order))
    for point in ("epoch 1 last", "epoch 2 last", "evaluated 2"):
        for name, value in runs[0][point].items():
            torch.testing.assert_close(value, runs[1][point][name])
