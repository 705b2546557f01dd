"""RollbackHook: a run with a planted bad batch ends as one without that batch, to the last bit."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hydraloop.engine.checkpoint.rollback import Rollback
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.errors import UserError
from hydraloop.hooks import (
    CheckInvalidLossHook,
    CheckpointHook,
    EarlyStoppingHook,
    LoggerHook,
    RollbackHook,
    SyncBuffersHook,
)
from hydraloop.hooks.check_invalid_loss import InvalidLossError
from hydraloop.hooks.ema.hook import EMAHook
from hydraloop.hooks.runtime_info import RuntimeInfoHook
from hydraloop.tasks.task import Task
from tests.helpers import Recorder, at, differences
from tests.hooks.tiny_runs import Scripted, Stopper, batches, bits, engine_of, load, model
from tests.ranks import on_ranks


def hooks(**options: Any) -> dict[str, Any]:
    return {
        "runtime_info": RuntimeInfoHook(),
        "ema": EMAHook(),
        "rollback": RollbackHook(**{"window": 6, "interval": 3, **options}),
        "logger": LoggerHook(interval=2),
        "checkpoint": CheckpointHook(by_epoch=False, interval=3),
    }


def planted(epoch: list[Any], at: int, factor: float) -> list[Any]:
    return [*epoch[:at], (epoch[at][0], epoch[at][1] * factor), *epoch[at + 1 :]]


def final(run_dir: Path, name: str) -> dict[str, Any]:
    found = load(run_dir / "checkpoints" / f"{name}.pth")
    return {entry: found[entry] for entry in ("state_dict", "optimizer", "rng")} | {"ema": found["hooks"]["ema"]}


def records(run_dir: Path) -> list[str]:
    import json

    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [str((one["mode"], one["iteration"], one.get("loss"))) for one in lines]


@pytest.mark.parametrize(
    ("factor", "accumulate", "at", "left_out"),
    [
        (100.0, 1, 13, [13]),
        (float("nan"), 1, 13, [13]),
        (float("inf"), 3, 13, [12, 13, 14]),
        (100.0, 1, 10, [10]),
        (100.0, 1, 19, [19]),
    ],
)
def test_a_bad_batch_is_left_out_to_the_last_bit(
    factor: float, accumulate: int, at: int, left_out: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good, options = batches(20), {"accumulate": accumulate, "val": False}
    without = [batch for index, batch in enumerate(good) if index not in left_out]
    engine_of(tmp_path / "without", hooks(), train=without, max_epochs=1, **options).train()
    bad = planted(good, at, factor)
    with caplog.at_level(logging.WARNING, "hydraloop.hooks.rollback"):
        engine = engine_of(tmp_path / "run", hooks(), train=bad, max_epochs=1, **options)
        assert engine.train().status == "finished"
    assert engine.progress.batch_in_epoch == 0
    assert engine.progress.iteration == len(without)
    (line,) = [line for line in caplog.messages if "back to" in line]
    assert line.endswith("left out (rollback 1 of 3)")
    assert ("times the median" in line) == (factor == 100)
    name = f"iter_{len(without)}"
    assert not list(differences(final(tmp_path / "run", name), final(tmp_path / "without", name)))
    assert records(tmp_path / "run") == records(tmp_path / "without")


def on_rank(distributed: Distributed, run_dir: str, factor: float) -> dict[str, Any]:
    """Train with a batch that is bad on rank 1 only."""
    good = [(inputs, inputs.sum(1, keepdim=True).expand(4, 5)) for inputs, _ in batches(12, seed=distributed.rank)]
    if not factor:
        train = [batch for index, batch in enumerate(good) if index != 8]
    else:
        train = planted(good, 8, factor) if distributed.rank else good
    net = model()[0]  # without batch statistics, which each rank has for itself
    options: dict[str, Any] = {"max_epochs": 1, "val": False, "distributed": distributed, "net": net}
    engine = engine_of(Path(run_dir), hooks(), train=train, **options)
    engine.train()
    return {
        "weights": bits(engine.model),
        "iteration": engine.progress.iteration,
        "left_out": dict(engine.progress.left_out),
    }


@pytest.mark.slow
def test_all_ranks_go_back_if_one_has_a_bad_loss(tmp_path: Path) -> None:
    expected = on_ranks(2, on_rank, str(tmp_path / "without"), 0.0)
    for name, factor in (("spike", 1e3), ("nan", float("nan"))):
        found = on_ranks(2, on_rank, str(tmp_path / name), factor)
        for one, other in zip(found, expected, strict=True):
            assert one["left_out"] == {0: {8}}
            assert not list(differences({**one, "left_out": {}}, {**other, "left_out": {}}))


class Given(Task):
    """The loss is in the batch, as a sum and a count."""

    def forward(self, batch: Any) -> dict[str, Any]:
        total, count = batch
        return {"loss": (total.sum() + 0 * sum(value.sum() for value in self.parameters()), count.sum())}


class Shares(list[Any]):
    """Batches of a rank, of which the fourth is a filler on rank 1."""

    rank = 0

    def samples_at(self, batch_idx: int) -> tuple[int, int]:
        filler = batch_idx == 3
        return (0 if filler and self.rank else 1), 2 - filler


def weighted_on_rank(distributed: Distributed, run_dir: str) -> tuple[int, Any, list[Any]]:
    """Rank 0 has one term and rank 1 has 99 of value 1; a term of 100 hardly changes the mean. A filler is NaN."""
    terms = ([1.0, 1, 1, 1, 100, 1], [99.0, 99, 99, math.nan, 99, 99])[distributed.rank]
    count = (1, 99)[distributed.rank]
    train = Shares((torch.tensor([total]), torch.tensor([count])) for total in terms)
    train.rank = distributed.rank
    found = {
        "runtime_info": RuntimeInfoHook(),
        "check": CheckInvalidLossHook(interval=1),
        "rollback": RollbackHook(window=4, interval=1),
        "logger": LoggerHook(interval=1),
        "checkpoint": CheckpointHook(by_epoch=False, interval=1),
    }
    options: dict[str, Any] = {"val": False, "distributed": distributed, "max_epochs": 1}
    engine = engine_of(Path(run_dir), found, train=train, **options)
    engine.task.__class__ = Given
    engine.train()
    return (
        engine.progress.iteration,
        dict(engine.progress.left_out),
        records(Path(run_dir)) if distributed.is_main else [],
    )


def test_losses_of_ranks_count_by_their_terms_and_fillers_not_at_all(tmp_path: Path) -> None:
    (iterations, left_out, losses), _ = on_ranks(2, weighted_on_rank, str(tmp_path))
    assert (iterations, left_out) == (6, {})
    expected = [1.0, 1.0, 1.0, 1.0, 1.99, 1.0]
    assert losses == [str(("train", index + 1, loss)) for index, loss in enumerate(expected)]


def going_back(distributed: Distributed, run_dir: str) -> list[dict[str, Any]]:
    """Train with other data on each rank; return the buffers of each validation. The run goes back once, to 3."""
    buffers: list[dict[str, Any]] = []

    def keep(engine: Engine) -> None:
        buffers.append({name: value.clone() for name, value in engine.model.named_buffers()})

    def go_back(engine: Engine) -> None:
        raise Rollback(Path(run_dir) / "checkpoints" / "iter_3.pth")

    found = {
        "sync_buffers": SyncBuffersHook(),
        "keep": at("before_val_epoch", keep, nth=0),
        "checkpoint": CheckpointHook(by_epoch=False, interval=3),
        "back": at("before_train_iter", go_back, nth=7),
    }
    options: dict[str, Any] = {"distributed": distributed, "max_epochs": 1, "val_by_epoch": False, "val_interval": 2}
    engine_of(Path(run_dir), found, train=batches(8, seed=distributed.rank), **options).train()
    return buffers


@pytest.mark.slow
def test_after_a_rollback_each_validation_has_equal_buffers(tmp_path: Path) -> None:
    one, other = on_ranks(2, going_back, str(tmp_path))
    assert len(one) == 6, "at 2, 4 and 6, and again at 4, 6 and 8"
    assert list(differences(one, other)) == []


def test_a_bad_batch_in_a_later_epoch_of_a_run_by_epoch(tmp_path: Path) -> None:
    """The epoch's checkpoint would have the bad weights, so it is not written; the epochs keep their ends."""
    found = {"rollback": RollbackHook(interval=100, window=4), "checkpoint": CheckpointHook(save_best="loss")}
    epoch = batches(6)

    class Second(list[Any]):
        passes = 0

        def __iter__(self) -> Any:
            self.passes += 1
            return iter(planted(epoch, 5, 1e3) if self.passes in (2, 3) else epoch)

    engine = engine_of(tmp_path, found, train=Second(epoch), max_epochs=3)
    assert engine.train().status == "finished"
    assert (engine.progress.iteration, engine.progress.epoch, engine.progress.last_validation) == (17, 3, 17)
    assert {path.stem for path in (tmp_path / "checkpoints").glob("epoch_*.pth")} == {"epoch_1", "epoch_2", "epoch_3"}
    state = load(tmp_path / "checkpoints" / "epoch_3.pth")["hooks"]["rollback"]
    assert (state["left_out"], state["rollbacks"], len(state["losses"][""])) == ({1: [5]}, 1, 4)
    assert (tmp_path / "checkpoints" / "last_checkpoint").read_text() == "epoch_3.pth\n"


def test_a_validation_after_a_bad_loss_is_not_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`early_stopping` would end the run at its NaN."""
    found = {**hooks(interval=100), "early_stopping": EarlyStoppingHook()}
    bad = planted(batches(20), 13, float("nan"))
    engine = engine_of(tmp_path, found, train=bad, max_epochs=1, val_interval=7, val_by_epoch=False)
    assert engine.train().status == "finished"
    assert [line for line in records(tmp_path) if "val" in line and "nan" in line] == []


@pytest.mark.parametrize("point", ["before_val", "after_load_checkpoint"])
def test_a_rollback_is_caught_wherever_a_hook_raises_it(point: str, tmp_path: Path) -> None:
    """In the validation that a resumed run has missed, before its first iteration; and while the run goes back."""
    engine_of(tmp_path, {"checkpoint": CheckpointHook()}, max_epochs=2).train()
    first, second = (tmp_path / "checkpoints" / f"epoch_{epoch}.pth" for epoch in (1, 2))

    def go_back(engine: Engine) -> None:
        assert (engine.progress.iteration, engine.progress.epoch) == (8, 2)
        raise Rollback(first)

    going_back = {"mine": at(point, go_back, nth=2 if point == "after_load_checkpoint" else 1)}
    if point == "after_load_checkpoint":  # a first rollback, to the same checkpoint
        going_back["other"] = at("before_val", lambda engine: go_back_to(second), nth=1)
    trace = Recorder()
    found = {"checkpoint": CheckpointHook(), **going_back, "trace": trace}
    engine = engine_of(tmp_path / "again", found, resume=second)
    assert engine.train().status == "finished"
    assert (engine.progress.iteration, engine.progress.epoch) == (12, 3)
    assert sum(call.startswith("after_train_iter") for call in trace.trace) == 8


def go_back_to(checkpoint: Path) -> None:
    raise Rollback(checkpoint)


def test_the_best_validation_is_not_one_that_was_given_up(tmp_path: Path) -> None:
    """Not for `runtime_info`, and not for the test after training."""
    seen: list[Any] = []
    facts = at("before_train_epoch", lambda engine: seen.append((engine.messages.read("best"), engine.best)), nth=0)
    found = {
        "runtime_info": RuntimeInfoHook(),
        "facts": facts,
        "going_back": at("before_train_epoch", lambda engine: go_back_to(tmp_path / "saved.pth"), nth=3, priority=99),
        "saving": at("after_train_epoch", lambda engine: engine.save_checkpoint(tmp_path / "saved.pth"), nth=1),
        "checkpoint": CheckpointHook(interval=None, save_best="error", asynchronous=False),
    }
    engine_of(
        tmp_path, found, metrics={"error": Scripted([3.0, 2.0, 3.0, 4.0, 5.0], higher_is_better=False)}, max_epochs=3
    ).train()
    assert [best and (best.value, best.iteration) for best, _ in seen] == [
        None, (3.0, 4), (2.0, 8), (3.0, 4), (3.0, 4),
    ]  # fmt: skip
    assert [best and best.iteration for _, best in seen] == [None, 4, 8, 4, 4]


def test_a_resumed_run_leaves_the_same_batches_out(tmp_path: Path) -> None:
    bad = planted(batches(20), 13, 100.0)
    first = engine_of(tmp_path / "run", hooks(), train=bad, max_epochs=1, val=False)
    first.train()
    folder = tmp_path / "run" / "checkpoints"
    resumed = engine_of(tmp_path / "again", hooks(), train=bad, max_epochs=2, val=False, resume=folder / "iter_15.pth")
    resumed.train()
    assert resumed.progress.iteration == 38, "in the second epoch, it goes back again"
    assert not list(differences(final(tmp_path / "again", "iter_18"), final(tmp_path / "run", "iter_18")))


@pytest.mark.parametrize(
    ("at", "options", "why"),
    [
        (1, {}, "no checkpoint is from before it"),
        (13, {"skip_samples": False, "max_rollbacks": 2}, "has gone back 2 times already"),
    ],
)
def test_what_ends_the_run(at: int, options: dict[str, Any], why: str, tmp_path: Path) -> None:
    bad = planted(batches(20), at, float("nan"))
    with pytest.raises(InvalidLossError, match=rf"loss is nan at iteration {at + 1}, and .*{why}") as caught:
        engine_of(tmp_path, hooks(**options), train=bad, max_epochs=1, val=False).train()
    assert caught.value.batch_idx == at
    assert all(load(path)["progress"]["iteration"] <= at for path in (tmp_path / "checkpoints").glob("*.pth"))


def test_a_run_that_stops_at_a_bad_loss_does_not_save_it(tmp_path: Path) -> None:
    found = {**hooks(interval=100), "stopper": Stopper(stop_at=14)}
    with pytest.raises(InvalidLossError, match="the loss is nan at iteration 14, and training has ended"):
        engine_of(tmp_path, found, train=planted(batches(20), 13, float("nan")), max_epochs=1, val=False).train()
    assert (tmp_path / "checkpoints" / "last_checkpoint").read_text() == "iter_12.pth\n"


def test_a_preempted_run_goes_back_before_it_saves(tmp_path: Path) -> None:
    found = {**hooks(interval=100), "signal": at("before_train_iter", lambda engine: engine.preempt("SIGTERM"), nth=14)}
    engine = engine_of(tmp_path, found, train=planted(batches(20), 13, float("nan")), max_epochs=1, val=False)
    engine.train()
    assert engine.requests.preempted_by == "SIGTERM"
    assert (engine.progress.iteration, dict(engine.progress.left_out)) == (13, {0: {13}})
    assert load(tmp_path / "checkpoints" / "iter_13.pth")["hooks"]["rollback"]["left_out"] == {0: [13]}


def test_a_run_that_is_preempted_after_the_check_keeps_the_checkpoint_before_the_bad_loss(tmp_path: Path) -> None:
    """As with several ranks, which agree after the hooks of the iteration."""
    late = at("after_train_iter", lambda engine: engine.preempt("SIGTERM"), nth=14, priority=99)
    bad = planted(batches(20), 13, float("nan"))
    engine = engine_of(tmp_path, {**hooks(interval=100), "late": late}, train=bad, max_epochs=1, val=False)
    result = engine.train()
    assert (result.status, result.reason) == ("interrupted", "preempted by SIGTERM")
    assert (engine.progress.iteration, len(records(tmp_path))) == (12, 6)
    assert (tmp_path / "checkpoints" / "last_checkpoint").read_text() == "iter_12.pth\n"


def test_an_engine_that_trains_again_does_not_check_earlier_losses(tmp_path: Path) -> None:
    stopper, net = Stopper(stop_at=2), model()
    found = {"rollback": RollbackHook(interval=100), "stopper": stopper}
    options: dict[str, Any] = {"net": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1)}
    bad = planted(batches(4), 1, float("nan"))
    engine = engine_of(tmp_path, found, train=bad, max_epochs=1, val=False, **options)
    with pytest.raises(InvalidLossError, match="the loss is nan at iteration 2, and training has ended"):
        engine.train()
    stopper.stop_at = 0
    net.load_state_dict(model().state_dict())
    assert engine.train().status == "finished"


def test_checkpoints_by_time_continue_after_a_rollback(tmp_path: Path) -> None:
    """The time is over inside the window with the bad loss: the request is forgotten with that window."""
    saving = CheckpointHook(interval=None, time_interval=3600, save_last=False)

    def time_is_over(engine: Any) -> None:
        saving._next_save = 0.0

    found = {
        "rollback": RollbackHook(interval=1),
        "first": at("before_train_iter", time_is_over, nth=4),
        "inside": at("after_backward", time_is_over, nth=7),
        "checkpoint": saving,
    }
    bad = planted(batches(12), 7, float("nan"))
    engine = engine_of(tmp_path, found, train=bad, max_epochs=1, val=False, accumulate=3)
    assert engine.train().status == "finished"
    assert dict(engine.progress.left_out) == {0: {6, 7, 8}}
    assert saving._next_save < float("inf")


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def damage(engine: Any) -> None:
        engine.checkpoints.settle()
        path = tmp_path / "checkpoints" / "iter_12.pth"
        path.write_bytes(path.read_bytes()[:-9])

    found = {**hooks(), "damaging": at("before_train_iter", damage, nth=14)}
    bad = planted(batches(20), 13, 100.0)
    engine_of(tmp_path, found, train=bad, max_epochs=1, val=False).train()
    assert "back to " + str(tmp_path / "checkpoints" / "iter_9.pth") in caplog.text
    caplog.clear()
    resume = tmp_path / "checkpoints" / "iter_12.pth"  # written after the rollback, and before the batch
    again = engine_of(tmp_path / "again", hooks(), train=bad, max_epochs=1, val=False, resume=resume)
    again.train()
    assert "back to" not in caplog.text
    assert again.progress.iteration == 19


def test_only_what_is_named_is_bad(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bad = planted(batches(20), 13, 100.0)
    engine_of(tmp_path, hooks(on=["nan"]), train=bad, max_epochs=1, val=False).train()
    assert "back to" not in caplog.text


def test_without_checkpoints_a_bad_loss_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(InvalidLossError, match="no checkpoint is from before it"):
        engine_of(tmp_path, {"rollback": RollbackHook()}, train=planted(batches(4), 1, float("nan"))).train()


def test_batches_of_a_stream_cannot_be_left_out(tmp_path: Path) -> None:
    class Stream(list[Any]):
        def begin(self, first: int, iteration: int) -> Any:
            return self[first:]

        def state_at(self, first: int, iteration: int) -> None: ...

        def load_state(self, state: Any, first: int, iteration: int) -> None: ...

    with pytest.raises(UserError, match="batches of a stream") as caught:
        engine_of(tmp_path, {"rollback": RollbackHook()}, train=Stream(batches(4))).train()
    assert caught.value.key == "hooks.rollback.skip_samples"
    engine_of(tmp_path, {"rollback": RollbackHook(skip_samples=False)}, train=Stream(batches(4))).train()
