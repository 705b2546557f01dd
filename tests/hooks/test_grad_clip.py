"""GradClipHook on real runs: what the optimizer gets, and what the record says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.distributed.fsdp import whole
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.precision import FP16
from hydraloop.errors import UserError
from hydraloop.hooks import CheckpointHook, LoggerHook
from hydraloop.hooks.grad_clip import GradClipHook
from hydraloop.tasks import Regression
from tests.helpers import at, logged
from tests.hooks.tiny_runs import batches, engine_of, model
from tests.ranks import on_ranks


class Gradients(Hook):
    """The gradients at before_optimizer_step (copied), and with `records` what is recorded of each iteration."""

    def __init__(self, priority: int, *, records: bool = False) -> None:
        self.priority = priority  # type: ignore[misc]
        self._records = records
        self.seen: list[Tensor] = []
        self.records: list[dict[str, float]] = []

    def before_optimizer_step(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        gradients = [parameter.grad for parameter in engine.model.parameters() if parameter.grad is not None]
        self.seen.append(torch.cat([gradient.flatten() for gradient in gradients]).clone())

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        if self._records:
            self.records.append(engine.messages.means())


def run(run_dir: Path, hook: GradClipHook, **settings: Any) -> tuple[Gradients, Gradients]:
    before, after = Gradients(30), Gradients(45, records=True)
    engine_of(run_dir, {"before": before, "grad_clip": hook, "after": after}, **{"max_epochs": 1, **settings}).train()
    return before, after


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_the_norm_of_all_gradients_together_is_bounded(tmp_path: Path, norm_type: float) -> None:
    before, after = run(tmp_path, GradClipHook(max_norm=0.1, norm_type=norm_type))
    assert len(before.seen) == 4
    for raw, clipped in zip(before.seen, after.seen, strict=True):
        norm = torch.linalg.vector_norm(raw, norm_type)
        assert norm > 0.1
        torch.testing.assert_close(clipped, raw * (0.1 / norm), rtol=1e-4, atol=0)


def test_small_gradients_are_left_as_they_are(tmp_path: Path) -> None:
    before, after = run(tmp_path, GradClipHook(max_norm=1000.0))
    for raw, clipped in zip(before.seen, after.seen, strict=True):
        torch.testing.assert_close(clipped, raw)


def test_single_entries_are_bounded_by_value(tmp_path: Path) -> None:
    before, after = run(tmp_path, GradClipHook(clip_value=0.01))
    for raw, clipped in zip(before.seen, after.seen, strict=True):
        assert torch.equal(clipped, raw.clamp(-0.01, 0.01))
        assert not torch.equal(clipped, raw)


@pytest.mark.parametrize("options", [{"max_norm": 0.1}, {"clip_value": 0.01}])
def test_the_norm_before_clipping_is_recorded(tmp_path: Path, options: dict[str, Any]) -> None:
    before, after = run(tmp_path, GradClipHook(**options))
    for raw, record in zip(before.seen, after.records, strict=True):
        assert record["grad_norm"] == pytest.approx(float(raw.norm()))


def test_it_clips_once_a_window(tmp_path: Path) -> None:
    before, after = run(tmp_path, GradClipHook(max_norm=0.1), accumulate=3)
    assert len(before.seen) == 2
    assert ["grad_norm" in record for record in after.records] == [False, False, True, True]
    assert all(float(clipped.norm()) == pytest.approx(0.1, rel=1e-4) for clipped in after.seen)


def test_the_norm_of_a_step_that_fp16_skips_is_not_recorded(tmp_path: Path) -> None:
    precision = FP16(torch.device("cpu"), init_scale=1e10, backoff_factor=0.01)
    before = Gradients(30)
    engine = engine_of(tmp_path, {"before": before, "grad_clip": GradClipHook(max_norm=0.1)}, precision=precision)
    engine.train()
    taken = [raw.norm().item() for raw in before.seen if raw.isfinite().all()]
    assert precision.skipped == len(before.seen) - len(taken) > 0
    assert engine.messages.means() == {"grad_norm": pytest.approx(sum(taken) / len(taken))}


def test_it_is_off_by_default(tmp_path: Path) -> None:
    before, after = run(tmp_path, GradClipHook())
    assert all(torch.equal(raw, same) for raw, same in zip(before.seen, after.seen, strict=True))
    assert not any("grad_norm" in record for record in after.records)


def test_groups_added_between_epochs_are_clipped_too(tmp_path: Path) -> None:
    net = model()
    first, last = net[0], net[3]
    assert isinstance(first, nn.Linear)
    assert isinstance(last, nn.Linear)
    optimizer = optim.SGD(last.parameters(), lr=0.1)

    class Adder(Hook):
        priority = 0

        def before_train_epoch(self, engine: Engine) -> None:
            if engine.progress.epoch == 1:
                engine.optimizer.add_param_group({"params": list(first.parameters()), "lr": 0.1})

    after = Gradients(45)
    hooks = {"adder": Adder(), "grad_clip": GradClipHook(clip_value=1e-3), "after": after}
    engine_of(tmp_path, hooks, net=net, optimizer=optimizer, max_epochs=2).train()
    sizes = [float(seen[: first.weight.numel()].abs().max()) for seen in after.seen]
    assert min(sizes[:4]) > 1e-3
    assert max(sizes[4:]) <= 1e-3 + 1e-9


def spoil(engine: Engine) -> None:
    """Make a gradient NaN; the loss is finite."""
    gradient = next(engine.model.parameters()).grad
    assert gradient is not None
    gradient[0, 0] = float("nan")


def skipping(run_dir: Path, bad: range, *, hooks: Mapping[str, Hook] | None = None, **settings: Any) -> Engine:
    """A run of 20 iterations whose gradients are NaN in some of them, counted from 1."""

    def spoil_some(engine: Engine) -> None:
        if engine.progress.iteration + 1 in bad:
            spoil(engine)

    clip = GradClipHook(skip_nonfinite=True)
    clip.key = "default_hooks.grad_clip"
    found = {"clip": clip, "bad": at("after_backward", spoil_some, nth=0), **(hooks or {})}
    return engine_of(run_dir, found, train=batches(20), val=False, **{"max_epochs": 1, **settings})


def test_skipped_steps_are_counted_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hooks = {"logger": LoggerHook(interval=20)}
    engine = skipping(tmp_path, range(3, 12), hooks=hooks)
    assert engine.train().status == "finished"
    assert engine.progress.optimizer_step == 11
    (record,) = logged(tmp_path / "metrics.jsonl")
    assert record["skipped"] == 9
    assert math.isfinite(record["grad_norm"])
    assert [line for line in caplog.messages if "skipped" in line] == [
        f"iteration {number}: the gradient norm is nan, so the step is skipped" for number in range(3, 12)
    ]


def test_ten_skipped_steps_in_a_row_end_the_run(tmp_path: Path) -> None:
    engine = skipping(
        tmp_path, range(3, 13), hooks={"checkpoint": CheckpointHook(by_epoch=False, interval=2, asynchronous=False)}
    )
    with pytest.raises(UserError) as caught:
        engine.train()
    assert engine.progress.iteration == 11
    assert str(caught.value) == (
        "default_hooks.grad_clip.skip_nonfinite: 10 steps in a row, to iteration 12, had gradients that are NaN or "
        f"infinite\n  Add resume={tmp_path}/checkpoints/iter_10.pth seed=1: other batches follow. "
        "Train with a lower optimizer.lr."
    )
    assert engine.loss_check.diverged


def test_a_resumed_run_counts_on(tmp_path: Path) -> None:
    saving = {"checkpoint": CheckpointHook(by_epoch=False, interval=8)}
    skipping(tmp_path, range(3, 6), hooks=saving).train()
    again = skipping(tmp_path / "2", range(20, 21), hooks=saving, resume=tmp_path / "checkpoints" / "iter_8.pth")
    again.train()
    assert again.run.precision.skipped == 4


def test_fp16_skips_such_steps_by_its_own_rule(tmp_path: Path) -> None:
    precision = FP16(torch.device("cpu"), init_scale=2.0**10)
    engine = skipping(tmp_path, range(3, 15), precision=precision)
    assert engine.train().status == "finished"
    assert (precision.skipped, precision.scale) == (12, 2.0**-2)


def test_the_step_of_an_optimizer_with_a_closure_cannot_be_skipped(tmp_path: Path) -> None:
    net = model()
    engine = skipping(tmp_path, range(0), net=net, optimizer=optim.LBFGS(net.parameters()))
    with pytest.raises(UserError, match=r"skip_nonfinite: the step of LBFGS computes the loss several times"):
        engine.train()


def of_embedding(run_dir: Path, hook: GradClipHook, *, sparse: bool, **settings: Any) -> list[Tensor]:
    """Return the trained weights of a model with an embedding, in which samples of a batch share an entry."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(6, 3, sparse=sparse), nn.Linear(3, 2))
    optimizer = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    train = [(torch.tensor([number, number, number + 1]), torch.ones(3, 2)) for number in range(5)]
    settings = {"val": False, "max_epochs": 2, **settings}
    engine_of(run_dir, {"grad_clip": hook}, net=net, optimizer=optimizer, train=train, **settings).train()
    return [parameter.detach() for parameter in net.parameters()]


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_sparse_gradients_are_clipped_as_dense_ones(tmp_path: Path, norm_type: float, accumulate: int) -> None:
    hook = GradClipHook(max_norm=0.1, norm_type=norm_type)
    sparse, dense = (
        of_embedding(tmp_path / str(kind), hook, sparse=kind, accumulate=accumulate) for kind in (True, False)
    )
    for one, other in zip(sparse, dense, strict=True):
        torch.testing.assert_close(one, other)


# GradClipHook where the model is in shards, and some ranks have no part of a parameter. -------------------------------


class Norms(Hook):
    """The recorded norm of each step."""

    priority = 90

    def __init__(self) -> None:
        self.norms: list[float] = []

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: object, outputs: object) -> None:
        self.norms.append(engine.messages.means()["grad_norm"])


def train(distributed: Distributed, run_dir: str, options: dict[str, float]) -> tuple[list[float], dict[str, Tensor]]:
    """Three steps on the same batches everywhere: the norms, and the weights they lead to."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    distributed.prepare(model)
    batches = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(3)]
    hooks: dict[str, Hook] = {"clip": GradClipHook(**options), "norms": (norms := Norms())}
    task = Regression(model, nn.MSELoss())
    loaders = Loaders(batches)
    engine_of(Path(run_dir), hooks, task=task, loaders=loaders, max_epochs=1, distributed=distributed).train()
    return norms.norms, {name: whole(value).detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("options", [{"max_norm": 0.01}, {"clip_value": 0.01}])
def test_a_rank_without_a_part_clips_as_one_process_does(options: dict[str, float], tmp_path: Path) -> None:
    norms, weights = train(Distributed(), str(tmp_path), options)
    assert min(norms) > 0.01
    for norms_in_shards, weights_in_shards in on_ranks(2, train, str(tmp_path), options, strategy="fsdp2"):
        assert norms_in_shards == pytest.approx(norms)
        for name, value in weights.items():
            torch.testing.assert_close(weights_in_shards[name], value)


def skip_one(distributed: Distributed, run_dir: str) -> tuple[int, int, list[list[float]]]:
    """The loss of the second step is NaN on the last rank. Sums of weights and momentum after each of three steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
    distributed.prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    batches = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(3)]
    if distributed.rank == distributed.world_size - 1:
        batches[1][1][0] = math.nan
    seen: list[list[float]] = []

    def see(engine: Engine) -> None:
        state = [whole(entry["momentum_buffer"]) for entry in optimizer.state.values()]
        seen.append([tensor.double().abs().sum().item() for tensor in (*map(whole, model.parameters()), *state)])

    hooks: dict[str, Hook] = {"clip": GradClipHook(skip_nonfinite=True), "see": at("after_train_iter", see, nth=0)}
    task = Regression(model, nn.MSELoss())
    options: dict[str, Any] = {"max_epochs": 1, "distributed": distributed, "optimizer": optimizer, "val": False}
    engine = engine_of(Path(run_dir), hooks, task=task, loaders=Loaders(batches), **options)
    assert engine.train().status == "finished"
    return engine.progress.optimizer_step, engine.run.precision.skipped, seen


@pytest.mark.parametrize("strategy", [None, "ddp", "fsdp2"])
def test_all_ranks_skip_a_step_which_leaves_weights_and_momentum(strategy: str | None, tmp_path: Path) -> None:
    if strategy is None:
        told = [skip_one(Distributed(), str(tmp_path))]
    else:
        told = on_ranks(2, skip_one, str(tmp_path), strategy=strategy)
    assert all(one == told[0] for one in told)
    steps, skipped, (before, after, end) = told[0]
    assert (steps, skipped) == (2, 1)
    assert before == after
    assert end != after
