"""Several ranks: collectives counted, buffers, evaluation, checkpoints that fit any strategy and number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from hydraloop.data.loader import build_loader
from hydraloop.engine.distributed import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.parts import Loaders, Settings
from hydraloop.hooks import CheckpointHook, EMAHook
from hydraloop.tasks import Regression
from tests.ranks import RankError, on_ranks
from tests.unit.engine.test_equality import assert_same, dataset, network, train

# Collectives. --------------------------------------------------------------------------------------------------------


class Profiled(Hook):
    """The collectives of twelve iterations in the middle of an epoch."""

    def __init__(self) -> None:
        self.profile = profile(activities=[ProfilerActivity.CPU])
        self.steps = 0

    def before_train_iter(self, engine: Engine, batch_idx: int, batch: Any) -> None:
        if batch_idx == 6:  # DDP makes its buckets anew after the first average
            self.profile.__enter__()

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Any) -> None:
        if 6 <= batch_idx <= 17:
            self.steps += engine.stepped
        if batch_idx == 17:
            self.profile.__exit__(None, None, None)


def collectives(distributed: Distributed, accumulate: int, pairs: bool, run_dir: str) -> tuple[int, dict[str, int]]:
    """Optimizer steps, and collectives by name, of twelve iterations."""
    torch.manual_seed(0)
    task = (Pairs if pairs else Regression)(
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), nn.MSELoss()
    )
    loader = build_loader(
        dataset(80), shuffle=True, batch_size=2, rank=distributed.rank, world_size=distributed.world_size
    )
    engine = Engine(
        task=task,
        optimizer=torch.optim.SGD(task.parameters(), lr=0.01),
        loaders=Loaders(loader),
        hooks={"profiled": (profiled := Profiled())},
        settings=Settings(device="cpu", max_epochs=1, accumulate=accumulate),
        run_dir=Path(run_dir),
        distributed=distributed,
    )
    engine._requests.next_exchange = 10**9  # what goes among the hosts in the background is another test's
    engine.train()
    names = [event.name for event in profiled.profile.events() or () if event.name.startswith("gloo:")]
    return profiled.steps, {name: names.count(name) for name in names}


class Pairs(Regression):
    """A loss given as its sum and number."""

    def forward(self, batch: Any) -> dict[str, Any]:
        """All samples count."""
        loss = super().forward(batch)["loss"]
        return {"loss": (loss * len(batch[0]), torch.tensor(len(batch[0])))}


@pytest.mark.filterwarnings("ignore:.*")  # of the profiler
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize(("accumulate", "expected"), [(1, 12), (3, 4)])
def test_exactly_one_all_reduce_for_each_optimizer_step(
    accumulate: int, expected: int, pairs: bool, tmp_path: Path
) -> None:
    for steps, events in on_ranks(2, collectives, accumulate, pairs, str(tmp_path)):
        assert steps == expected
        assert events == {"gloo:all_reduce": expected}


# Buffers and evaluation. ---------------------------------------------------------------------------------------------


def evaluate(distributed: Distributed, samples: int, strategy: str) -> tuple[dict[str, float], list[list[float]]]:
    """Metrics over `samples` samples with a trained normalisation layer, and the samples this rank saw."""
    torchmetrics = pytest.importorskip("torchmetrics")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model[1].running_mean += distributed.rank  # as if each rank had seen other batches
    metrics = {"own": torchmetrics.MeanAbsoluteError()}
    task = Regression(model, nn.MSELoss(), metrics)
    distributed.prepare(model)
    part = {"rank": distributed.rank, "world_size": distributed.world_size}
    engine = Engine(
        task=task,
        loaders=Loaders(None, build_loader(dataset(samples), shuffle=False, batch_size=2, **part)),
        hooks={"sees": (sees := Sees())},
        settings=Settings(device="cpu"),
        distributed=distributed,
    )
    return engine.validate(), sees.samples


class Sees(Hook):
    """The inputs of validation batches."""

    def __init__(self) -> None:
        self.samples: list[list[float]] = []

    def after_val_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Any) -> None:
        self.samples += batch[0].tolist()


@pytest.mark.filterwarnings("ignore:The ``compute`` method")  # torchmetrics', on a rank without samples
@pytest.mark.parametrize("samples", [1, 2, 5, 7, 12])
@pytest.mark.parametrize(("world_size", "strategy"), [(2, "ddp"), (3, "ddp"), (3, "fsdp2")])
def test_evaluation_counts_every_sample_once(world_size: int, strategy: str, samples: int) -> None:
    expected, seen = evaluate(Distributed(), samples, "auto")
    results = on_ranks(world_size, evaluate, samples, strategy, strategy=strategy)
    for metrics, _ in results:
        assert metrics == pytest.approx(expected, abs=1e-6)
        assert metrics == results[0][0]
    assert sorted(sample for _, samples in results for sample in samples) == sorted(seen)


def unequal(distributed: Distributed, run_dir: str) -> None:
    """A train loader with one batch more on rank 1."""
    task = Regression(nn.Linear(3, 1), nn.MSELoss())
    batch = (torch.zeros(2, 3), torch.zeros(2, 1))
    Engine(
        task=task,
        optimizer=torch.optim.SGD(task.parameters(), lr=0.01),
        loaders=Loaders([batch] * (2 + distributed.rank)),
        settings=Settings(device="cpu", max_epochs=1),
        run_dir=Path(run_dir),
        distributed=distributed,
    ).train()


def test_an_unequal_number_of_batches_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="unequal numbers of batches in an epoch: 2, 3"):
        on_ranks(2, unequal, str(tmp_path))


# Checkpoints. --------------------------------------------------------------------------------------------------------


def train_and_save(
    distributed: Distributed, run_dir: str, epochs: int, resume: str | None = None
) -> dict[str, Any] | None:
    """Train with dropout, AdamW and ema, a checkpoint an epoch. Returns the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.Linear(5, 1))
    task = Regression(model, nn.MSELoss())
    distributed.prepare(model)
    torch.manual_seed(100 + distributed.rank)
    part = {"rank": distributed.rank, "world_size": distributed.world_size}
    engine = Engine(
        task=task,
        optimizer=torch.optim.AdamW(task.parameters(), lr=0.01),
        loaders=Loaders(
            build_loader(dataset(), shuffle=True, batch_size=6 // distributed.world_size, **part),
            build_loader(dataset(5), shuffle=False, batch_size=2, **part),
        ),
        hooks={"ema": EMAHook(), "checkpoint": CheckpointHook(save_best="loss")},
        settings=Settings(device="cpu", max_epochs=epochs, resume=None if resume is None else Path(resume)),
        run_dir=Path(run_dir),
        distributed=distributed,
    )
    engine.train()
    return None


def load(path: Path) -> dict[str, Any]:
    """A checkpoint file."""
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


def assert_equal(found: Any, expected: Any, where: str = "") -> None:
    """Nested values, tensors to the last bit."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name in expected:
            assert_equal(found[name], expected[name], f"{where}[{name!r}]")
    elif isinstance(expected, Tensor):
        assert type(found) is Tensor, where
        assert torch.equal(found, expected), where
    elif isinstance(expected, list):
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_equal(one, other, f"{where}[{index}]")
    else:
        assert found == expected, where


PARTS = ("state_dict", "optimizer", "hooks", "rng", "progress")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_resumed_run_is_the_same_to_the_last_bit(strategy: str, tmp_path: Path) -> None:
    on_ranks(2, train_and_save, str(tmp_path / "whole"), 4, strategy=strategy)
    on_ranks(2, train_and_save, str(tmp_path / "cut"), 2, strategy=strategy)
    middle = tmp_path / "cut" / "checkpoints" / "epoch_2.pth"
    on_ranks(2, train_and_save, str(tmp_path / "cut"), 4, str(middle), strategy=strategy)
    whole, cut = (load(tmp_path / name / "checkpoints" / "epoch_4.pth") for name in ("whole", "cut"))
    for part in ("state_dict", "optimizer", "rng", "progress"):
        assert_equal(cut[part], whole[part], part)
    assert_equal(cut["hooks"]["ema"], whole["hooks"]["ema"])


def test_a_checkpoint_of_shards_is_one_of_whole_tensors(tmp_path: Path) -> None:
    for strategy in ("ddp", "fsdp2"):
        on_ranks(2, train_and_save, str(tmp_path / strategy), 2, strategy=strategy)
    ddp, fsdp2 = (load(tmp_path / name / "checkpoints" / "epoch_2.pth") for name in ("ddp", "fsdp2"))
    for part in ("state_dict", "optimizer"):
        assert shapes(fsdp2[part]) == shapes(ddp[part])
    for name, value in ddp["state_dict"].items():
        torch.testing.assert_close(fsdp2["state_dict"][name], value, rtol=0, atol=1e-6)
    for index, entry in ddp["optimizer"]["state"].items():
        for name, value in entry.items():
            torch.testing.assert_close(fsdp2["optimizer"]["state"][index][name], value, rtol=0, atol=1e-6)


def shapes(value: Any) -> Any:
    """The structure of a nested value, with shapes in place of tensors."""
    if isinstance(value, dict):
        return {name: shapes(item) for name, item in value.items()}
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__


@pytest.mark.parametrize(("first", "then"), [("ddp", "fsdp2"), ("fsdp2", "ddp"), ("fsdp2", "one"), ("one", "fsdp2")])
def test_a_run_goes_on_with_another_strategy_or_number_of_ranks(first: str, then: str, tmp_path: Path) -> None:
    def go(strategy: str, *args: Any) -> None:
        if strategy == "one":
            train_and_save(Distributed(), *args)
        else:
            on_ranks(2, train_and_save, *args, strategy=strategy)

    go(first, str(tmp_path), 1)
    before = load(tmp_path / "checkpoints" / "epoch_1.pth")
    go(then, str(tmp_path), 2, str(tmp_path / "checkpoints" / "epoch_1.pth"))
    after = load(tmp_path / "checkpoints" / "epoch_2.pth")
    assert after["progress"]["optimizer_step"] == 2 * before["progress"]["optimizer_step"] == 6
    assert after["optimizer"]["state"][0]["step"] == 6
    assert shapes(after["state_dict"]) == shapes(before["state_dict"])
    assert after["hooks"]["ema"]["updates"] == 6


# What else is done to a model. ---------------------------------------------------------------------------------------


def test_fsdp2_around_blocks(tmp_path: Path) -> None:
    from hydraloop.schemas.distributed import FSDPConf

    expected = train(Distributed(), 6, 1, {}, str(tmp_path))
    for fsdp in (FSDPConf(wrap=["Linear"]), FSDPConf(wrap=["Linear"], reshard_after_forward=False)):
        for found in on_ranks(2, train, 3, 1, {}, str(tmp_path), strategy="fsdp2", fsdp=fsdp):
            assert_same(found, expected)


def test_a_class_that_does_not_occur_is_refused(tmp_path: Path) -> None:
    from hydraloop.schemas.distributed import FSDPConf

    with pytest.raises(RankError, match="Sequential has no module of the class 'Block'"):
        on_ranks(2, train, 3, 1, {}, str(tmp_path), strategy="fsdp2", fsdp=FSDPConf(wrap=["Block"]))


def test_the_network_has_no_dropout() -> None:
    # Else the equalities above would hold by luck.
    assert not any(isinstance(module, nn.Dropout) for module in network().modules())
