"""GradClipHook on real runs: what the optimizer gets, and what the record says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from hydraloop.engine.device.precision import FP16
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.errors import UserError
from hydraloop.hooks.grad_clip import GradClipHook
from tests.hooks.tiny_runs import engine_of, model


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


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"clip_value": 1.0}])
def test_a_norm_that_is_not_finite_ends_the_run_where_asked(tmp_path: Path, options: dict[str, Any]) -> None:
    train = [(torch.full((4, 3), float("nan")), torch.zeros(4, 2))]
    with pytest.raises(RuntimeError, match="non-finite"):
        run(tmp_path, GradClipHook(**options, error_if_nonfinite=True), train=train)
    _, after = run(tmp_path, GradClipHook(**options), train=train, allow_nan=True)
    assert len(after.seen) == 1


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


def test_sparse_gradients_that_cannot_be_used_are_one_message(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^task.model: the gradients of 0 are sparse: .*\n  Use sparse=False"):
        of_embedding(tmp_path, GradClipHook(clip_value=0.1), sparse=True)
