"""Autocast, tf32 and gradient scaling: dtypes, skipped steps, and what is restored after a run."""

from __future__ import annotations

import dataclasses
import inspect
import io
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.precision import FP16, TF32, Autocast, Precision, make_precision
from hydraloop.errors import UserError
from hydraloop.schemas.engine import BF16Conf, FP16Conf, FP32Conf, TF32Conf
from tests.helpers import HostSyncs, at, batches, differences, make_engine, tiny_task
from tests.ranks import on_ranks

CPU = torch.device("cpu")
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
IMPLEMENTATIONS = [{"fused": True}, {"foreach": True}]
ids = [next(iter(option)) for option in IMPLEMENTATIONS]


def linear() -> nn.Linear:
    """`[N, 3] -> [N, 2]`, the same each time."""
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def step(precision: Precision, model: nn.Module, optimizer: optim.Optimizer, factor: float = 1.0) -> bool:
    """One whole optimizer step on a loss that is multiplied by `factor`; inf makes its gradients overflow."""
    optimizer.zero_grad()
    loss = precision.forward(model)(torch.ones(4, 3)).float().square().mean()
    precision.backward(loss * factor)
    precision.unscale(optimizer)
    return precision.step(optimizer)


def engine_with(precision: Precision, run_dir: Path, hooks: dict[str, Hook] | None = None, **loaders: Any) -> Engine:
    """An engine on the CPU over a tiny task and SGD, for one epoch."""
    task = tiny_task()
    return make_engine(
        run_dir, hooks, loaders=Loaders(**{"train": batches(2), **loaders}), task=task, precision=precision
    )


def state(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, Any]:
    """Weights and optimizer state, copied."""
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()["state"]], file)
    file.seek(0)
    weights, slots = torch.load(file, weights_only=True)
    return {"weights": weights, "optimizer": slots}


# Which one, and what it refuses. -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "kind", "dtype"),
    [
        (FP32Conf, Precision, None),
        (TF32Conf, TF32, None),
        (BF16Conf, Autocast, torch.bfloat16),
        (FP16Conf, FP16, torch.float16),
    ],
)
def test_each_option_of_the_group_makes_its_precision(schema: Any, kind: type, dtype: torch.dtype | None) -> None:
    precision = make_precision(dataclasses.asdict(schema()), CPU)
    assert type(precision) is kind
    assert (precision.name, precision.dtype, precision.skipped) == (schema.name, dtype, 0)


def test_the_options_of_fp16_are_those_of_its_schema_with_the_same_defaults() -> None:
    options = dataclasses.asdict(FP16Conf())
    parameters = inspect.signature(FP16).parameters
    assert {name: options[name] for name in options if name != "name"} == {
        name: parameter.default for name, parameter in parameters.items() if name != "device"
    }


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(UserError, match="'fp8' is unknown") as caught:
        make_precision({"name": "fp8"}, CPU)
    assert caught.value.key == "precision.name"


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_a_device_without_autocast_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"meta has no {name}") as caught:
        make_precision({"name": name}, torch.device("meta"))
    assert caught.value.key == "precision"
    assert "precision=fp32" in str(caught.value.remedy)


# Autocast. -----------------------------------------------------------------------------------------------------------


def test_a_change_of_weights_is_seen_by_the_next_forward() -> None:
    """Autocast keeps the casts of parameters that need gradients while it is on; a swap of weights is in between."""
    model = linear()
    forward = Autocast(CPU).forward(model)
    assert forward(torch.ones(1, 3)).abs().sum() > 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert forward(torch.ones(1, 3)).abs().sum() == 0


def test_training_and_evaluation_are_under_the_same_autocast(tmp_path: Path) -> None:
    dtypes: dict[str, set[torch.dtype]] = {"train": set(), "val": set()}
    engine = engine_with(make_precision({"name": "bf16"}, CPU), tmp_path, val=batches(2))
    engine.model.register_forward_hook(
        lambda module, inputs, output: dtypes["train" if module.training else "val"].add(output.dtype)
    )
    engine.train()
    assert dtypes == {"train": {torch.bfloat16}, "val": {torch.bfloat16}}
    assert {parameter.dtype for parameter in engine.model.parameters()} == {torch.float32}


# tf32. ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
def test_tf32_is_on_while_the_engine_runs_and_what_was_set_before_is_restored(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    seen: list[Any] = []

    def look(engine: Engine) -> None:
        seen.append((torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32))
        if fails:
            raise RuntimeError("on purpose")

    before = torch.get_float32_matmul_precision()
    engine = engine_with(make_precision({"name": "tf32"}, CPU), tmp_path, {"seeing": at("after_run", look)})
    with pytest.raises(RuntimeError, match="on purpose") if fails else nullcontext():
        engine.train()
    assert seen == [("high", True)]
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == (before, False)


# fp16. ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [optim.AdamW, optim.SGD])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=ids)
@pytest.mark.parametrize("first", [True, False])
def test_a_step_that_overflows_changes_nothing_but_the_scale(
    kind: type[optim.Optimizer], implementation: dict[str, bool], first: bool
) -> None:
    model, precision = linear(), FP16(CPU, init_scale=8)
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, **implementation}
    optimizer = kind(model.parameters(), **options)
    if not first:
        assert step(precision, model, optimizer)
    before = state(model, optimizer)
    assert not step(precision, model, optimizer, float("inf"))
    assert list(differences(state(model, optimizer), before)) == []
    assert (precision.scale, precision.skipped) == (4, 1)
    assert not step(precision, model, optimizer, float("nan"))
    assert (precision.scale, precision.skipped) == (2, 2)
    assert step(precision, model, optimizer)
    assert set(differences(state(model, optimizer)["weights"], before["weights"])) == {"['weight']", "['bias']"}
    assert (precision.scale, precision.skipped) == (2, 2)


@pytest.mark.parametrize("loss_scale", [512.0, 1000.1])
def test_a_fixed_scale_never_changes_and_an_overflow_skips_its_step(loss_scale: float) -> None:
    """Also at the interval after which a dynamic scale grows, below `min_scale`, and in a resumed run."""
    options = {"name": "fp16", "loss_scale": loss_scale, "growth_interval": 2, "init_scale": 1024, "min_scale": 1024}
    model, precision = linear(), make_precision(options, CPU)
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    assert isinstance(precision, FP16)
    fixed = precision.scale
    assert fixed == pytest.approx(loss_scale)
    factors = (1.0, 1.0, 1.0, float("inf"), 1.0, float("nan"), 1.0, 1.0, 1.0)
    taken = []
    for factor in factors:
        taken.append(step(precision, model, optimizer, factor))
        assert precision._scaler.get_scale() == precision.scale == fixed
    assert taken == [factor == 1 for factor in factors]
    assert precision.skipped == 2
    resumed = make_precision({"name": "fp16", "loss_scale": 8.0}, CPU)
    resumed.load_state_dict(precision.state_dict())
    assert isinstance(resumed, FP16)
    assert (resumed.scale, resumed.skipped) == (8, 2)
    assert step(resumed, model, optimizer)


def test_a_fixed_scale_that_skips_every_step_ends_the_run() -> None:
    """As if the weights were NaN. A good step in between begins the count again."""
    model, precision = linear(), FP16(CPU, loss_scale=8.0)
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        assert not any(step(precision, model, optimizer, float("nan")) for _ in range(29))
        assert step(precision, model, optimizer)
    assert not any(step(precision, model, optimizer, float("nan")) for _ in range(29))
    with pytest.raises(UserError, match=r"precision\.loss_scale: gradients are infinite or NaN"):
        step(precision, model, optimizer, float("nan"))
    assert precision.diverged


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=ids)
def test_a_step_costs_one_host_sync_and_the_rest_none(implementation: dict[str, bool]) -> None:
    def syncs_of(precision: Precision, factor: float) -> tuple[int, int]:
        model = linear()
        optimizer = optim.AdamW(model.parameters(), **implementation)  # type: ignore[arg-type]
        with HostSyncs() as syncs:
            loss = precision.forward(model)(torch.ones(4, 3)).float().square().mean()
            precision.backward(loss * factor)
            precision.unscale(optimizer)
            before = syncs.count
            assert precision.step(optimizer) is (factor == 1)
        return before, syncs.count

    _, optimizers_own = syncs_of(Precision(), 1.0)  # AdamW reads its step counters, which are the host's
    assert syncs_of(FP16(CPU), 1.0) == (0, optimizers_own + 1)
    assert syncs_of(FP16(CPU, loss_scale=512), 1.0) == (0, optimizers_own + 1)
    assert syncs_of(FP16(CPU), float("inf")) == (0, 1)


def test_a_loss_that_is_never_finite_ends_the_run() -> None:
    """Otherwise every step would be skipped without a message."""
    model, precision = linear(), FP16(CPU, init_scale=8, min_scale=1)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        assert not step(precision, model, optimizer, float("nan"))
    with pytest.raises(UserError, match=r"even at a loss scale of 0\.5 \(4 steps skipped\)") as caught:
        step(precision, model, optimizer, float("nan"))
    assert caught.value.key == "precision.min_scale"
    assert "precision=bf16" in str(caught.value.remedy)


def test_after_a_run_that_ended_before_its_step_the_next_one_begins_cleanly() -> None:
    model, precision = linear(), FP16(CPU, init_scale=8)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    assert not step(precision, model, optimizer, float("inf"))
    with precision.active():
        precision.backward(model(torch.ones(4, 3)).sum())
        precision.unscale(optimizer)  # and a hook in before_optimizer_step fails
    assert step(precision, model, optimizer)
    assert (precision.scale, precision.skipped) == (4, 1)


# The state. ----------------------------------------------------------------------------------------------------------


def saved(precision: Precision) -> dict[str, Any]:
    """Return the state, saved to a file and loaded."""
    file = io.BytesIO()
    torch.save(precision.state_dict(), file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def test_a_resumed_scaler_goes_on_as_if_never_stopped() -> None:
    factors = [1.0, float("inf"), 1.0, 1.0, 1.0, 1.0, float("inf"), 1.0, 1.0, 1.0]
    options = {"name": "fp16", "init_scale": 1000.1, "growth_interval": 3}
    whole = [(precision.scale, precision.skipped) for precision in _run(make_precision(options, CPU), factors)]
    for cut in range(1, len(factors)):
        first = list(_run(make_precision(options, CPU), factors[:cut]))[-1]
        second = make_precision(options, CPU)
        second.load_state_dict(saved(first))
        assert list(differences(second.state_dict(), first.state_dict())) == []
        assert [(p.scale, p.skipped) for p in _run(second, factors[cut:])] == whole[cut:]


def _run(precision: Any, factors: list[float]) -> Iterator[Any]:
    model = linear()
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    for factor in factors:
        step(precision, model, optimizer, factor)
        yield precision


def test_the_options_are_the_resumed_runs_own() -> None:
    precision = FP16(CPU, growth_factor=4, growth_interval=2)
    precision.load_state_dict({"scale": 8.0, "good_steps": 1, "skipped": 0})
    assert [p.scale for p in _run(precision, [1.0])] == [32]


def test_another_precisions_state_changes_nothing() -> None:
    fp16 = FP16(CPU)
    fp16.load_state_dict(Precision().state_dict())
    assert fp16.scale == 65536
    for name in ("fp32", "tf32", "bf16"):
        precision = make_precision({"name": name}, CPU)
        precision.load_state_dict(fp16.state_dict())
        assert precision.state_dict() == {"skipped": 0}


# With the engine, and on several ranks. ------------------------------------------------------------------------------


def test_the_engine_skips_what_overflows(tmp_path: Path) -> None:
    """Counters and weights stay the same in that iteration only, and no gradient is left."""
    train = batches(4)
    train[1] = (train[1][0] * float("inf"), train[1][1])
    stepped: list[tuple[bool, Tensor]] = []

    class Listening(Hook):
        def after_train_iter(self, engine: Any, batch_idx: int, batch: Any, outputs: Any) -> None:
            stepped.append((engine.stepper.stepped, engine.model.weight.detach().clone()))

    precision = make_precision({"name": "fp16", "init_scale": 256}, CPU)
    engine = engine_with(precision, tmp_path, {"listening": Listening()}, train=train)
    engine.train()
    assert [taken for taken, _ in stepped] == [True, False, True, True]
    moved = [not torch.equal(one[1], other[1]) for one, other in pairwise(stepped)]
    assert moved == [False, True, True]
    assert (engine.progress.iteration, engine.progress.optimizer_step, precision.skipped) == (4, 3, 1)


@pytest.mark.parametrize("options", [{"name": "fp32"}, {"name": "fp16", "init_scale": 256}], ids=["fp32", "fp16"])
@pytest.mark.parametrize("point", ["before_optimizer_step", "after_backward"])
def test_a_step_that_a_hook_skips_is_counted_and_the_next_one_is_taken(
    tmp_path: Path, options: Any, point: str
) -> None:
    precision = make_precision(options, CPU)
    skipping = at(point, lambda engine: engine.skip_step(), nth=2)
    engine = engine_with(precision, tmp_path, {"skipping": skipping}, train=batches(4))
    engine.train()
    assert (engine.progress.iteration, engine.progress.optimizer_step, precision.skipped) == (4, 3, 1)
    with pytest.raises(RuntimeError, match="call skip_step in after_backward or before_optimizer_step"):
        engine.skip_step()


@pytest.mark.parametrize("loss_scale", [None, 256.0])
def test_a_step_that_a_hook_skips_because_of_an_overflow_counts_once_and_lowers_the_scale(
    loss_scale: float | None,
) -> None:
    model = linear()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    precision = FP16(CPU, init_scale=256, loss_scale=loss_scale)
    precision.backward(model(torch.ones(4, 3)).sum() * float("inf"))
    precision.unscale(optimizer)
    precision.skip()
    assert (precision.skipped, precision.scale) == (1, loss_scale or 128.0)
    assert step(precision, model, optimizer)


def overflow_on_one_rank(distributed: Distributed, implementation: dict[str, bool]) -> list[Any]:
    """Three steps of a model in shards; in the second, one entry of the last rank's shard of a gradient is infinite."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    distributed.prepare(model)
    precision = FP16(CPU, init_scale=8)
    optimizer = optim.AdamW(model.parameters(), lr=0.1, **implementation)  # type: ignore[arg-type]
    seen: list[Any] = []
    for iteration in range(3):
        precision.backward(model(torch.ones(2, 4)).sum())
        if iteration == 1 and distributed.rank == 1:
            shard: Any = model[1].weight.grad
            shard.to_local()[0, 0] = float("inf")
        before = [parameter.detach().to_local().clone() for parameter in model.parameters()]  # type: ignore[attr-defined]
        precision.unscale(optimizer)
        taken = precision.step(optimizer)
        optimizer.zero_grad()
        after = [parameter.detach().to_local() for parameter in model.parameters()]  # type: ignore[attr-defined]
        moved = any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
        seen.append((taken, moved, precision.scale, precision.skipped))
    return seen


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=ids)
def test_an_overflow_in_one_shard_skips_the_step_on_all_ranks(implementation: dict[str, bool]) -> None:
    """torch reduces over the mesh whether there was one; without that, the ranks would diverge."""
    expected = [(True, True, 8, 0), (False, False, 4, 1), (True, True, 4, 1)]
    assert on_ranks(2, overflow_on_one_rank, implementation, strategy="fsdp2") == [expected, expected]
