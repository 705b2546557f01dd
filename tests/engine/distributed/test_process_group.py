"""Several ranks: collectives counted, buffers, evaluation, checkpoints that fit any strategy and number of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hydraloop.data import build_loader
from hydraloop.engine.checkpoint.format import load
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.run_parts import Settings
from hydraloop.errors import UserError
from hydraloop.hooks import CheckpointHook, EMAHook
from hydraloop.tasks import Regression
from tests.engine.distributed.test_equality import assert_same, dataset, train
from tests.helpers import EngineWithNeededHooks, differences, make_engine
from tests.marks import slow
from tests.ranks import RankError, on_ranks

# Collectives. --------------------------------------------------------------------------------------------------------


class Counted(Hook):
    """Counts the collectives in the devices' group, and the optimizer steps, of twelve iterations."""

    def __init__(self) -> None:
        self.steps = self.collectives = 0

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Any) -> None:
        if batch_idx == 5:  # DDP makes its buckets again after the first average
            self.collectives -= _so_far()
        if 6 <= batch_idx <= 17:
            self.steps += engine.stepper.stepped
        if batch_idx == 17:
            self.collectives += _so_far()


def _so_far() -> int:
    """Return torch's number of the next collective of the group."""
    group: Any = torch.distributed.group.WORLD
    return int(group._get_sequence_number_for_group())


def collectives(distributed: Distributed, accumulate: int, kind: type[Regression], run_dir: str) -> tuple[int, int]:
    """Optimizer steps and collectives."""
    torch.manual_seed(0)
    task = kind(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), nn.MSELoss())
    loader = build_loader(
        dataset(80), shuffle=True, batch_size=2, rank=distributed.rank, world_size=distributed.world_size
    )
    engine = make_engine(
        Path(run_dir),
        {"counted": (counted := Counted())},
        train=loader,
        task=task,
        distributed=distributed,
        accumulate=accumulate,
    )
    flag = engine.requests._flag  # exchanges among the hosts have another test
    flag._sent_in, flag._interval = "train", 10**9
    engine.train()
    return counted.steps, counted.collectives


class Pairs(Regression):
    """A loss given as its sum and number."""

    def forward(self, batch: Any) -> dict[str, Any]:
        """All samples count."""
        loss = super().forward(batch)["loss"]
        return {"loss": (loss * len(batch[0]), torch.tensor(len(batch[0])))}


@pytest.mark.parametrize(("kind", "each"), [(Regression, 1), (Pairs, 2)])
@pytest.mark.parametrize(("accumulate", "expected"), [(1, 12), (3, 4)])
def test_one_all_reduce_for_each_optimizer_step_and_one_for_its_number_of_terms(
    accumulate: int, expected: int, kind: type[Regression], each: int, tmp_path: Path
) -> None:
    for steps, reduced in on_ranks(2, collectives, accumulate, kind, str(tmp_path)):
        assert steps == expected
        assert reduced == each * expected


# Buffers and evaluation. ---------------------------------------------------------------------------------------------


class Twice(Regression):
    """Evaluates with two forwards, as test-time augmentation does: a rank without samples needs both."""

    def evaluate(self, batch: Any) -> dict[str, Any]:
        """The second forward does not count."""
        self.model(-batch[0])
        return super().evaluate(batch)


def evaluate(distributed: Distributed, samples: int, strategy: str) -> tuple[dict[str, float], list[list[float]]]:
    """Metrics over `samples` samples with a trained normalisation layer, and the samples this rank saw."""
    torchmetrics = pytest.importorskip("torchmetrics")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    metrics = {"own": torchmetrics.MeanAbsoluteError()}
    task = Twice(model, nn.MSELoss(), metrics)
    distributed.prepare(model)
    part = {"rank": distributed.rank, "world_size": distributed.world_size}
    engine = EngineWithNeededHooks(
        task=task,
        loaders=Loaders(None, build_loader(dataset(samples), shuffle=False, batch_size=2, **part)),
        hooks={"sees": (sees := Sees())},
        settings=Settings(device="cpu"),
        distributed=distributed,
    )
    model[1].running_mean += distributed.rank  # as if each rank had seen other batches
    return engine.validate(), sees.samples


class Sees(Hook):
    """The inputs of validation batches."""

    def __init__(self) -> None:
        self.samples: list[list[float]] = []

    def after_val_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Any) -> None:
        self.samples += batch[0].tolist()


@pytest.mark.parametrize("samples", [3, 7])
@pytest.mark.parametrize(("world_size", "strategy"), [(2, "ddp"), slow(3, "ddp"), (3, "fsdp2")])
def test_evaluation_counts_every_sample_once(world_size: int, strategy: str, samples: int) -> None:
    expected, seen = evaluate(Distributed(), samples, "auto")
    results = on_ranks(world_size, evaluate, samples, strategy, strategy=strategy)
    for metrics, _ in results:
        assert metrics == pytest.approx(expected, abs=1e-6)
        assert metrics == results[0][0]
    assert sorted(sample for _, samples in results for sample in samples) == sorted(seen)


def unequal(distributed: Distributed, run_dir: str) -> None:
    """A train loader with one batch more on rank 1. Without training, it is not read."""
    task = Regression(nn.Linear(3, 1), nn.MSELoss())
    batch = (torch.zeros(2, 3), torch.zeros(2, 1))
    train = [batch] * (2 + distributed.rank)
    engine = make_engine(Path(run_dir), train=train, val=[batch], task=task, distributed=distributed)
    engine.validate()
    Path(run_dir, f"validated_{distributed.rank}").touch()
    engine.train()


def test_an_unequal_number_of_batches_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="different numbers of batches in an epoch: 2, 3"):
        on_ranks(2, unequal, str(tmp_path))
    assert len([*tmp_path.glob("validated_*")]) == 2


# Checkpoints. --------------------------------------------------------------------------------------------------------


def train_and_save(
    distributed: Distributed, run_dir: str, epochs: int, resume: str | None = None, dropout: float = 0.5
) -> None:
    """Train with dropout, AdamW and ema, a checkpoint an epoch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(dropout), nn.Linear(5, 1))
    task = Regression(model, nn.MSELoss())
    distributed.prepare(model)
    torch.manual_seed(100 + distributed.rank)
    part = {"rank": distributed.rank, "world_size": distributed.world_size}
    engine = make_engine(
        Path(run_dir),
        {"ema": EMAHook(), "checkpoint": CheckpointHook(save_best="loss")},
        train=build_loader(dataset(), shuffle=True, batch_size=6 // distributed.world_size, **part),
        val=build_loader(dataset(5), shuffle=False, batch_size=2, **part),
        task=task,
        optimizer=torch.optim.AdamW(task.parameters(), lr=0.01),
        distributed=distributed,
        max_epochs=epochs,
        resume=None if resume is None else Path(resume),
    )
    engine.train()


@pytest.mark.parametrize("strategy", ["ddp", slow("fsdp2")])
def test_a_resumed_run_is_the_same_to_the_last_bit(strategy: str, tmp_path: Path) -> None:
    on_ranks(2, train_and_save, str(tmp_path / "whole"), 4, strategy=strategy)
    on_ranks(2, train_and_save, str(tmp_path / "cut"), 2, strategy=strategy)
    middle = tmp_path / "cut" / "checkpoints" / "epoch_2.pth"
    on_ranks(2, train_and_save, str(tmp_path / "cut"), 4, str(middle), strategy=strategy)
    whole, cut = (load(tmp_path / name / "checkpoints" / "epoch_4.pth") for name in ("whole", "cut"))
    for part in ("state_dict", "optimizer", "rng", "progress"):
        assert list(differences(cut[part], whole[part])) == [], part
    assert list(differences(cut["hooks"]["ema"], whole["hooks"]["ema"])) == []


@pytest.mark.parametrize(("first", "then"), [("ddp", "fsdp2"), ("fsdp2", "ddp"), ("fsdp2", "one"), ("one", "fsdp2")])
def test_a_run_goes_on_with_another_strategy_or_number_of_ranks(first: str, then: str, tmp_path: Path) -> None:
    def go(strategy: str, *args: Any) -> None:
        if strategy == "one":
            train_and_save(Distributed(), *args)
        else:
            on_ranks(2, train_and_save, *args, strategy=strategy)

    go("one", str(tmp_path / "whole"), 2, None, 0.0)
    go(first, str(tmp_path), 1, None, 0.0)
    go(then, str(tmp_path), 2, str(tmp_path / "checkpoints" / "epoch_1.pth"), 0.0)
    found, expected = (load(path / "checkpoints" / "epoch_2.pth") for path in (tmp_path, tmp_path / "whole"))
    assert_close(found["state_dict"], expected["state_dict"])
    assert_close(found["optimizer"]["state"], expected["optimizer"]["state"])
    assert_close(found["hooks"]["ema"]["averaged"], expected["hooks"]["ema"]["averaged"])
    assert found["progress"] == expected["progress"]


def assert_close(found: Any, expected: Any) -> None:
    """Nested tensors to 1e-6."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            assert_close(found[name], expected[name])
    else:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


class Stateful(Hook):
    """Has a state that differs between ranks."""

    def state_dict(self) -> dict[str, Any]:
        return {"counted": Counter({3: 1, 7: 2}), "pair": (1, 2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class OnMain(Stateful):
    """Only rank 0 has it."""

    rank_zero_only = True


class FailsOnOne(Stateful):
    """Fails on rank 1, and the run continues."""

    on_error = "warn"

    def before_run(self, engine: Engine) -> None:
        self.engine = engine

    def state_dict(self) -> dict[str, Any]:
        if self.engine.distributed.rank == 1:
            raise ValueError("on one rank only")
        return {"weight": next(self.engine.model.parameters())}


def save_states(distributed: Distributed, run_dir: str) -> None:
    """A checkpoint with the states of all three."""
    task = Regression(nn.Linear(3, 2), nn.MSELoss())
    distributed.prepare(task.model)
    engine = make_engine(
        Path(run_dir),
        {"all": Stateful(), "main": OnMain(), "one": FailsOnOne()},
        train=[(torch.zeros(2, 3), torch.zeros(2, 2))],
        task=task,
        distributed=distributed,
    )
    engine.hooks["one"].before_run(engine)
    engine.checkpoints.save(Path(run_dir) / "states.pth")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_states_that_some_ranks_do_not_have(strategy: str, tmp_path: Path) -> None:
    on_ranks(2, save_states, str(tmp_path), strategy=strategy)
    expected = {"counted": Counter({3: 1, 7: 2}), "pair": (1, 2)}
    assert load(tmp_path / "states.pth")["hooks"] == {"all": expected, "main": expected}


class Full(CheckpointHook):
    """A checkpoint hook whose files cannot be written."""

    def _save(self, engine: Engine, paths: Sequence[Path], *done: Any, **options: Any) -> None:
        if engine.distributed.is_main:
            paths[0].parent.mkdir(parents=True, exist_ok=True)
            paths[0].mkdir(exist_ok=True)  # no file can be put there
        super()._save(engine, paths, *done, **options)


def cannot_write(distributed: Distributed, run_dir: str) -> tuple[int, str]:
    """Train with it. Returns the trained epochs, and what was raised."""
    task = Regression(nn.Linear(3, 1), nn.MSELoss())
    engine = make_engine(
        Path(run_dir),
        {"checkpoint": Full()},
        train=[(torch.zeros(2, 3), torch.zeros(2, 1))],
        task=task,
        distributed=distributed,
        max_epochs=3,
    )
    with pytest.raises(UserError) as caught:
        engine.train()
    return engine.progress.epoch, caught.value.problem


def test_a_checkpoint_that_cannot_be_written_is_one_outcome_on_all_ranks(tmp_path: Path) -> None:
    problem = f"{tmp_path / 'checkpoints' / 'epoch_3.pth'} could not be written: the end of training is lost"
    for epochs, found in on_ranks(2, cannot_write, str(tmp_path)):
        assert epochs == 3, "training continues"
        assert found.startswith(problem)


# Other changes of a model. ---------------------------------------------------------------------------------------


def test_fsdp2_around_blocks(tmp_path: Path) -> None:
    from hydraloop.schemas.engine import FSDPConf

    expected = train(Distributed(), 6, 1, {}, str(tmp_path))
    for fsdp in (FSDPConf(wrap=["Linear"]), FSDPConf(wrap=["Linear"], reshard_after_forward=False)):
        for found in on_ranks(2, train, 3, 1, {}, str(tmp_path), strategy="fsdp2", fsdp=fsdp):
            assert_same(found, expected)


class Some(nn.Module):
    """A model with a part that takes turns."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 1), nn.Linear(3, 1)
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        """`[N, 3]` to `[N, 1]`."""
        self.calls += 1
        return (self.one if self.calls % 2 else self.other)(inputs)


def take_turns(distributed: Distributed, run_dir: str) -> list[float]:
    """Train it. Returns its weights."""
    torch.manual_seed(0)
    task = Regression(model := Some(), nn.MSELoss())
    make_engine(
        Path(run_dir),
        train=[(torch.ones(2, 3) * (distributed.rank + 1), torch.zeros(2, 1))] * 4,
        task=task,
        lr=0.1,
        distributed=distributed,
    ).train()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def test_parameters_that_are_not_used_in_each_iteration(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="find_unused_parameters"):  # of torch
        on_ranks(2, take_turns, str(tmp_path))
    one, other = on_ranks(2, take_turns, str(tmp_path), find_unused_parameters=True)
    assert one == other
