"""`sync_buffers` and `sync_norm`: the mean over ranks with different data; in checkpoints, evaluations and training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.distributed.fsdp import local, whole
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.run_parts import Settings
from hydraloop.hooks import CheckpointHook, EMAHook, SyncBuffersHook
from hydraloop.hooks.sync_buffers import average_over_ranks
from hydraloop.tasks import Regression
from tests.helpers import EngineWithNeededHooks, HostSyncs
from tests.hooks.tiny_runs import engine_of, load
from tests.marks import slow
from tests.ranks import on_ranks

Buffers = dict[str, Tensor]


class Net(nn.Module):
    """Batch normalisation, and buffers of other kinds."""

    third: Tensor
    seen: Tensor
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.register_buffer("third", torch.tensor([1 / 3, 0.1]))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(2, dtype=torch.bool))

    def forward(self, batch: Tensor) -> Tensor:
        out: Tensor = self.body(batch)
        return out


class Watch(Hook):
    """The buffers at some mount points, before (priority 0) or after (100) the tested hook."""

    def __init__(self) -> None:
        self.seen: dict[str, Buffers] = {}

    def _look(self, engine: Engine, point: str) -> None:
        name = f"{point} {engine.progress.iteration}"
        self.seen[name] = {name: value.clone() for name, value in engine.model.named_buffers()}

    def after_train_epoch(self, engine: Engine) -> None:
        self._look(engine, "after_train_epoch")

    def before_val(self, engine: Engine) -> None:
        self._look(engine, "before_val")

    def before_val_iter(self, engine: Engine, batch_idx: int, batch: Any) -> None:
        self._look(engine, "before_val_iter")

    def before_test(self, engine: Engine) -> None:
        self._look(engine, "before_test")


class First(Watch):
    """Before all others."""

    priority = 0


class Last(Watch):
    """After all others; requests a checkpoint at the end of an epoch."""

    priority = 100

    def after_train_epoch(self, engine: Engine) -> None:
        super().after_train_epoch(engine)
        engine.request_checkpoint(f"saved_{engine.progress.epoch}")


def run(
    distributed: Distributed, run_dir: str, hook: str, settings: dict[str, Any]
) -> tuple[dict[str, Buffers], dict[str, Buffers]]:
    """Buffers before and after the hook, in a run in which each rank has different batches."""
    torch.manual_seed(0)
    net = Net()
    distributed.prepare(net)
    generator = torch.Generator().manual_seed(distributed.rank)

    def batches(count: int) -> list[tuple[Tensor, Tensor]]:
        offset = 5 * distributed.rank
        return [(torch.randn(4, 3, generator=generator) + offset, torch.randn(4, 1)) for _ in range(count)]

    net.seen += distributed.rank
    net.mask[0] = distributed.is_main
    tested = SyncBuffersHook(norm_only=hook == "sync_norm")
    hooks: dict[str, Hook] = {"first": (first := First()), "last": (last := Last()), hook: tested}
    task = Regression(net, nn.MSELoss())
    engine = EngineWithNeededHooks(
        task=task,
        optimizer=torch.optim.SGD(task.parameters(), lr=0.01),
        loaders=Loaders(batches(4), batches(1), batches(1)),
        hooks=hooks,
        settings=Settings(**{"device": "cpu", "max_epochs": 2, **settings}),
        run_dir=Path(run_dir),
        distributed=distributed,
    )
    net.seen[1] += distributed.rank * 3 + 1  # after the engine has given rank 0's to all ranks at the start
    net.mask[1] = not distributed.is_main
    engine.train()
    return first.seen, last.seen


def mean(of: list[Buffers], name: str) -> Tensor:
    return torch.stack([buffers[name].double() for buffers in of]).mean(0)


def assert_averaged(befores: list[Buffers], afters: list[Buffers], names: list[str]) -> None:
    """The ranks had different statistics, and now have the mean."""
    for name in names:
        assert not torch.equal(befores[0][name], befores[1][name])
        for after in afters:
            torch.testing.assert_close(after[name].double(), mean(befores, name), check_dtype=False)


NORM = ["body.1.running_mean", "body.1.running_var"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_at_each_epochs_end_all_ranks_have_the_mean(strategy: str, tmp_path: Path) -> None:
    results = on_ranks(2, run, str(tmp_path), "sync_buffers", {}, strategy=strategy)
    for point in ("after_train_epoch 4", "after_train_epoch 8"):
        befores = [first[point] for first, _ in results]
        afters = [last[point] for _, last in results]
        assert_averaged(befores, afters, NORM)
        saved = load(tmp_path / "checkpoints" / f"saved_{int(point[-1]) // 4}.pth")["state_dict"]
        for name in NORM:
            assert torch.equal(saved[name], afters[0][name]), "before the checkpoint is written"
    for rank, (first, last) in enumerate(results if strategy == "ddp" else []):  # all ranks begin with rank 0's buffers
        before, after = first["after_train_epoch 4"], last["after_train_epoch 4"]
        assert before["seen"].tolist() == [0, 1 + 3 * rank]
        assert after["seen"].tolist() == [0, 2]  # of 1 and 4
        assert after["body.1.num_batches_tracked"].item() == 4
        assert torch.equal(after["mask"], before["mask"])
        assert torch.equal(after["third"], before["third"])


def test_a_validation_inside_an_epoch_averages_first(tmp_path: Path) -> None:
    settings = {"val_by_epoch": False, "val_interval": 3}
    results = on_ranks(2, run, str(tmp_path), "sync_buffers", settings)
    for point in ("before_val 3", "before_val 6"):
        assert_averaged([first[point] for first, _ in results], [last[point] for _, last in results], NORM)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_statistics_of_layers_have_the_mean_before_each_evaluation(strategy: str, tmp_path: Path) -> None:
    results = on_ranks(2, run, str(tmp_path), "sync_norm", {}, strategy=strategy)
    for point in ("before_val 4", "before_val 8"):
        assert_averaged([first[point] for first, _ in results], [last[point] for _, last in results], NORM)
    for first, last in results:
        assert torch.equal(last["before_val_iter 4"][NORM[0]], last["before_val 4"][NORM[0]])
        assert torch.equal(first["after_train_epoch 8"][NORM[0]], last["after_train_epoch 8"][NORM[0]]), "not here"
        assert torch.equal(first["before_val 4"]["seen"], last["before_val 4"]["seen"]), "the buffer of no layer"
        assert last["before_val 4"]["body.1.num_batches_tracked"].item() == 4


def test_statistics_have_the_mean_before_a_test_where_nothing_was_validated(tmp_path: Path) -> None:
    results = on_ranks(2, run, str(tmp_path), "sync_norm", {"val_interval": None})
    assert_averaged(
        [first["before_test 8"] for first, _ in results], [last["before_test 8"] for _, last in results], NORM
    )


@pytest.mark.parametrize("hook", ["sync_buffers", "sync_norm"])
def test_one_process_has_nothing_to_do(hook: str, tmp_path: Path) -> None:
    first, last = run(Distributed(), str(tmp_path), hook, {})
    for point, buffers in first.items():
        assert all(torch.equal(buffers[name], last[point][name]) for name in buffers)


# Resume. -------------------------------------------------------------------------------------------------------------


class Seen(Hook):
    """The metrics of each validation."""

    def __init__(self) -> None:
        self.metrics: dict[int, dict[str, float]] = {}

    def after_val_epoch(self, engine: Engine, metrics: Mapping[str, float]) -> None:
        self.metrics[engine.progress.iteration] = dict(metrics)


class Queued(Regression):
    """Its own buffer has the last outputs of this rank, and the loss depends on it."""

    queue: Tensor

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net, nn.MSELoss())
        self.register_buffer("queue", torch.zeros(6, 1))

    def forward(self, batch: Any) -> dict[str, Any]:
        found = super().forward(batch)
        if self.training:
            found["loss"] = found["loss"] + self.queue.mean() * self.model(batch[0]).mean()
            self.queue.copy_(torch.cat([self.model(batch[0]).detach(), self.queue])[:6])
        return found


def saving_run(
    distributed: Distributed, run_dir: str, hook: str | None, averages: bool, resume: Path | None = None
) -> tuple[dict[int, dict[str, float]], dict[str, list[Any]]]:
    """Train two epochs with a checkpoint at each iteration. Return the metrics of the validations, and this rank's
    buffers and averages at the end."""
    torch.manual_seed(0)
    net = Net()
    distributed.prepare(net)
    task = Queued(net)
    generator = torch.Generator().manual_seed(distributed.rank)
    train = [(torch.randn(4, 3, generator=generator) + distributed.rank, torch.randn(4, 1)) for _ in range(4)]
    val = [(torch.randn(4, 3, generator=torch.Generator().manual_seed(9)), torch.zeros(4, 1))]
    hooks: dict[str, Hook] = {"seen": (seen := Seen()), "checkpoint": CheckpointHook(by_epoch=False, interval=1)}
    if hook is not None:
        hooks[hook] = SyncBuffersHook(norm_only=hook == "sync_norm")
    if averages:
        hooks["ema"] = EMAHook(update_buffers=True, momentum=0.3, warmup=False)
    engine = Engine(
        task=task,
        optimizer=torch.optim.SGD(task.parameters(), lr=0.01),
        loaders=Loaders(train, val),
        hooks=hooks,
        settings=Settings(device="cpu", max_epochs=2, resume=resume),
        run_dir=Path(run_dir),
        distributed=distributed,
    )
    engine.train()
    found = dict(task.named_buffers())
    for name, value in net.state_dict().items():
        found[f"net {name}"] = local(value)
    if averages:
        found |= {
            f"average {name}": local(value) for name, value in engine.hooks["ema"].state_dict()["averaged"].items()
        }
    return seen.metrics, {name: value.tolist() for name, value in found.items()}


@pytest.mark.parametrize(
    ("hook", "averages", "strategy"),
    [
        ("sync_buffers", False, "ddp"),
        ("sync_norm", True, "ddp"),
        (None, False, "ddp"),
        slow("sync_buffers", True, "ddp"),
        slow("sync_norm", False, "ddp"),
        slow("sync_norm", True, "fsdp2"),
    ],
)
def test_each_rank_continues_with_its_own_buffers(
    hook: str | None, averages: bool, strategy: str, tmp_path: Path
) -> None:
    """From inside an epoch, from its end before its validation, and from the end of training."""
    options = {"strategy": strategy}
    whole = on_ranks(2, saving_run, str(tmp_path / "whole"), hook, averages, **options)
    for iteration in (2, 4, 6, 8):
        saved = tmp_path / "whole" / "checkpoints" / f"iter_{iteration}.pth"
        cut = on_ranks(2, saving_run, str(tmp_path / f"cut{iteration}"), hook, averages, saved, **options)
        for (metrics, buffers), (expected, same) in zip(cut, whole, strict=True):
            assert metrics == {at: found for at, found in expected.items() if at >= iteration}
            assert [name for name, value in same.items() if buffers[name] != value] == [], iteration


def test_a_checkpoint_has_only_the_buffers_that_differ(tmp_path: Path) -> None:
    on_ranks(2, saving_run, str(tmp_path), "sync_buffers", True)
    inside, after = (load(tmp_path / "checkpoints" / f"iter_{iteration}.pth") for iteration in (3, 4))
    assert [sorted(of_rank) for of_rank in inside["buffers"]] == [
        [],
        sorted([*(f"hooks/ema/model.{name}" for name in NORM), *(f"model.{name}" for name in NORM), "queue"]),
    ]
    assert [sorted(of_rank) for of_rank in after["buffers"]] == [[], ["queue"]], "the others are averaged"


def test_another_number_of_ranks_continues_with_those_of_the_first(tmp_path: Path) -> None:
    on_ranks(2, saving_run, str(tmp_path), None, False)
    path = tmp_path / "checkpoints" / "iter_8.pth"
    saved = load(path)
    for ranks in (1, 3):
        for _, buffers in on_ranks(ranks, saving_run, str(tmp_path / str(ranks)), None, False, path):
            assert buffers["queue"] == saved["task"]["queue"].tolist()
            assert buffers[f"model.{NORM[0]}"] == saved["state_dict"][NORM[0]].tolist()


# The mean. -----------------------------------------------------------------------------------------------------------


def averages(distributed: Distributed) -> tuple[list[Tensor], int]:
    """Tensors of all kinds, and the host syncs of averaging them."""
    rank = distributed.rank
    tensors = [
        torch.tensor([0.1, 1 / 3, 1e-30, 3e38]),  # equal on all ranks
        torch.tensor([0.1, 7.0], dtype=torch.bfloat16),
        torch.full((2, 3), float(rank)),
        torch.tensor(rank * 2.0, dtype=torch.float16),
        torch.tensor([complex(rank, -rank)]),
        torch.tensor([2**40 + rank, rank == 2], dtype=torch.int64),
        torch.tensor([rank == 0]),
        torch.empty(0, 4),
    ]
    with HostSyncs() as counted:
        average_over_ranks(tensors, distributed)
    return tensors, counted.count


def test_the_mean_of_every_kind_of_tensor() -> None:
    """Of three ranks, where a sum divided by three is not what it was in float32."""
    equal, _ = averages(Distributed())
    for rank, (tensors, syncs) in enumerate(on_ranks(3, averages)):
        assert torch.equal(tensors[0], equal[0])
        assert torch.equal(tensors[1], equal[1])
        assert tensors[2].tolist() == [[1.0] * 3] * 2
        assert tensors[3].item() == 2.0
        assert tensors[4].tolist() == [complex(1, -1)]
        assert tensors[5].tolist() == [2**40 + 1, 0]
        assert tensors[6].tolist() == [rank == 0]
        assert syncs == 0


# `sync_norm` and `sync_buffers` with `ema`: the averages of statistics, which are what is evaluated. ------------------


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
