"""EMAHook on real runs, compared with averages in plain torch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn.utils import parametrizations, parametrize, prune

import hydraloop
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.distributed.fsdp import whole
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.precision import FP16
from hydraloop.errors import UserError
from hydraloop.hooks.build_from_config import build_hooks
from hydraloop.hooks.checkpoint import CheckpointHook
from hydraloop.hooks.ema import FORMULAS, EMAHook
from hydraloop.safety.allowlist import ALLOWLIST
from tests.config.composed import REPOSITORY
from tests.hooks.tiny_runs import Scripted, Stopper, batches, bits, engine_of, load, model, same
from tests.ranks import on_ranks

Weights = dict[str, Tensor]


class Recorder(Hook):
    """The raw weights after each optimizer step, each epoch, and what the model has in each evaluation."""

    priority = 45

    def __init__(self) -> None:
        self.steps: list[Weights] = []
        self.epochs: list[Weights] = []
        self.evaluated: list[Weights] = []
        self.before_val_weights: list[Weights] = []
        self.after_val_weights: list[Weights] = []

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        if engine.stepper.stepped:
            self.steps.append(bits(engine.model))

    def after_train_epoch(self, engine: Engine) -> None:
        self.epochs.append(bits(engine.model))

    def before_val(self, engine: Engine) -> None:
        self.before_val_weights.append(bits(engine.model))

    def before_val_iter(self, engine: Engine, batch_idx: int, batch: Any) -> None:
        if batch_idx == 0:
            self.evaluated.append(bits(engine.model))

    def after_val_epoch(self, engine: Engine, metrics: Mapping[str, float]) -> None:
        self.after_val_weights.append(bits(engine.model))

    def before_test_iter(self, engine: Engine, batch_idx: int, batch: Any) -> None:
        if batch_idx == 0:
            self.evaluated.append(bits(engine.model))


def run(run_dir: Path, ema: EMAHook, **settings: Any) -> tuple[Engine, Recorder]:
    recorder = Recorder()
    engine = engine_of(run_dir, {"recorder": recorder, "ema": ema}, **settings)
    engine.train()
    return engine, recorder


def average(weights: list[Weights], share: Callable[[int], float]) -> Weights:
    """The average of what was recorded, in float64: the first is copied, the u-th further one counts share(u)."""
    mean = {name: value.double() for name, value in weights[0].items()}
    for updates, new in enumerate(weights[1:], start=1):
        for name, value in new.items():
            mean[name] = mean[name] + share(updates) * (value.double() - mean[name])
    return mean


def check(averaged: Mapping[str, Tensor], expected: Weights) -> None:
    assert averaged
    for name, value in averaged.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-5, atol=1e-7)


# The average. --------------------------------------------------------------------------------------------------------


def test_the_average_is_of_the_parameters_and_in_float32(tmp_path: Path) -> None:
    ema = EMAHook()
    engine, recorder = run(tmp_path, ema)
    assert ema.updates == len(recorder.steps) == 12
    averaged = ema.state_dict()["averaged"]
    assert averaged.keys() == {name for name, _ in engine.model.named_parameters()}
    check(averaged, average(recorder.steps, lambda u: 9 / (10 + u)))
    assert not torch.equal(averaged["0.weight"], engine.model.state_dict()["0.weight"])


@pytest.mark.parametrize(("accumulate", "steps"), [(1, 12), (3, 6)])  # windows of 3 in epochs of 4: two steps each
def test_updates_follow_optimizer_steps_and_not_iterations(tmp_path: Path, accumulate: int, steps: int) -> None:
    ema = EMAHook(momentum=0.3, warmup=False)
    engine, recorder = run(tmp_path, ema, accumulate=accumulate)
    assert ema.updates == len(recorder.steps) == engine.progress.optimizer_step == steps
    assert engine.progress.iteration == 12
    check(ema.state_dict()["averaged"], average(recorder.steps, lambda u: 0.3))


@pytest.mark.parametrize(
    ("options", "counted"),
    [
        ({"interval": 5}, [5, 10]),
        ({"begin_iter": 4}, range(4, 13)),
        ({"interval": 3, "begin_iter": 4}, [4, 7, 10]),
        ({"begin_epoch": 2}, range(5, 13)),
        ({"begin_epoch": 2, "interval": 3}, [5, 8, 11]),
    ],
)
def test_interval_and_begin_count_optimizer_steps(tmp_path: Path, options: dict[str, Any], counted: list[int]) -> None:
    ema = EMAHook(momentum=0.3, warmup=False, **options)
    _, recorder = run(tmp_path, ema)
    assert ema.updates == len(counted)
    check(ema.state_dict()["averaged"], average([recorder.steps[n - 1] for n in counted], lambda u: 0.3))


class Updates(Hook):
    """The iterations after which `ema` has made an update."""

    priority = 60

    def __init__(self) -> None:
        self.at: list[int] = []

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        ema = engine.hooks["ema"]
        assert isinstance(ema, EMAHook)
        if ema.updates > len(self.at):
            self.at.append(engine.progress.iteration)


def test_steps_that_fp16_skips_do_not_postpone_begin_epoch(tmp_path: Path) -> None:
    updates, precision = Updates(), FP16(torch.device("cpu"), init_scale=1e7)
    hooks = {"ema": EMAHook(begin_epoch=3, interval=5), "updates": updates}
    engine_of(tmp_path, hooks, train=batches(10), precision=precision).train()
    assert 0 < precision.skipped < 20
    assert updates.at == [21, 26]


@pytest.mark.parametrize(
    ("options", "counted"), [({}, [1, 2, 3]), ({"interval": 2}, [2]), ({"begin_epoch": 2}, [2, 3])]
)
def test_by_epoch_averages_the_ends_of_epochs(tmp_path: Path, options: dict[str, Any], counted: list[int]) -> None:
    ema = EMAHook(ema_type="stochastic", by_epoch=True, **options)
    _, recorder = run(tmp_path, ema)
    assert ema.updates == len(counted)
    expected = average([recorder.epochs[n - 1] for n in counted], lambda u: 1 / (1 + u))
    check(ema.state_dict()["averaged"], expected)


class Overflow(Hook):
    """Makes the gradients of one iteration infinite, as a loss scale that is too large does."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def after_backward(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        if engine.progress.iteration + 1 == self.iteration:
            for parameter in engine.model.parameters():
                assert parameter.grad is not None
                parameter.grad.fill_(float("inf"))


@pytest.mark.parametrize(("overflow", "options"), [(2, {}), (1, {}), (3, {"accumulate": 3})])
def test_a_step_that_fp16_skips_is_no_update(tmp_path: Path, overflow: int, options: dict[str, Any]) -> None:
    ema, recorder = EMAHook(momentum=0.3, warmup=False), Recorder()
    hooks = {"overflow": Overflow(overflow), "recorder": recorder, "ema": ema}
    precision = FP16(torch.device("cpu"), init_scale=1024)
    engine = engine_of(tmp_path, hooks, precision=precision, max_epochs=2, **options)
    engine.train()
    assert (precision.skipped, precision.scale) == (1, 512)
    assert ema.updates == len(recorder.steps) == engine.progress.optimizer_step == (3 if options else 7)
    check(ema.state_dict()["averaged"], average(recorder.steps, lambda u: 0.3))


def test_buffers_are_averaged_or_copied_with_update_buffers(tmp_path: Path) -> None:
    ema = EMAHook(momentum=0.3, warmup=False, update_buffers=True)
    engine, recorder = run(tmp_path, ema)
    averaged = ema.state_dict()["averaged"]
    assert averaged.keys() == engine.model.state_dict().keys()
    counter = averaged.pop("1.num_batches_tracked")
    assert counter.dtype == torch.int64
    assert counter == 12
    check(averaged, average(recorder.steps, lambda u: 0.3))
    last = recorder.evaluated[-1]
    assert torch.equal(last["1.running_mean"], averaged["1.running_mean"])
    assert torch.equal(recorder.after_val_weights[-1]["1.running_mean"], recorder.steps[-1]["1.running_mean"])


def tenth(average: Tensor, weights: Tensor, updates: int) -> Tensor:
    """A formula of one's own."""
    return average.lerp(weights, 0.1)


class Growing(nn.Module):
    """A parametrization with a factor that grows in training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(()))

    def forward(self, weight: Tensor) -> Tensor:
        if self.training:
            self.factor += 0.01
        return weight * self.factor


class Pruner(Hook):
    """Prunes a weight of the last layer in each iteration."""

    def before_train_iter(self, engine: Engine, batch_idx: int, batch: Any) -> None:
        engine.model[3].weight_mask[0, batch_idx % 4] = 0


def normalised() -> nn.Sequential:
    """A model with buffers that are no statistics: of parametrizations in both of torch's forms, and of pruning."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        parametrizations.spectral_norm(layers[0])
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # torch deprecates it
            nn.utils.spectral_norm(layers[1])
        parametrize.register_parametrization(layers[2], "weight", Growing())
        prune.random_unstructured(layers[3], "weight", 0.1)
    return nn.Sequential(*layers)


@pytest.mark.parametrize("options", [*({"ema_type": name} for name in FORMULAS), {"weight": tenth}])
def test_buffers_that_are_no_statistics_are_not_averaged(tmp_path: Path, options: dict[str, Any]) -> None:
    ema = EMAHook(update_buffers=True, **options)
    hooks = {"recorder": (recorder := Recorder()), "ema": ema, "pruner": Pruner()}
    engine = engine_of(tmp_path, hooks, net=normalised())
    engine.train()
    raw, averaged = engine.model.state_dict(), ema.state_dict()["averaged"]
    buffers = {name for name, _ in engine.model.named_buffers()}
    assert {name.rpartition(".")[2] for name in buffers} == {
        "_u",
        "_v",
        "weight_u",
        "weight_v",
        "factor",
        "weight_mask",
    }
    for name in buffers:
        assert torch.equal(averaged[name], raw[name])
        assert torch.equal(recorder.evaluated[-1][name], raw[name])
    assert not torch.equal(averaged["0.bias"], raw["0.bias"])


class Tied(nn.Module):
    """One weight under two names, a frozen layer, and half precision."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first, self.second, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.second.weight = self.first.weight
        self.last.bfloat16().requires_grad_(False)
        self.last.bias.requires_grad_(True)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.second(self.first(inputs))
        return nn.functional.linear(hidden, self.last.weight.float(), self.last.bias.float())


def test_tied_frozen_and_16_bit_weights(tmp_path: Path) -> None:
    net = Tied()
    ema = EMAHook(momentum=0.3, warmup=False)
    optimizer = optim.SGD([parameter for parameter in net.parameters() if parameter.requires_grad], lr=0.1)
    engine, recorder = run(tmp_path, ema, net=net, optimizer=optimizer)
    averaged = ema.state_dict()["averaged"]
    assert averaged.keys() == net.state_dict().keys()
    assert averaged["first.weight"] is averaged["second.weight"]
    assert net.first.weight is net.second.weight
    check(averaged, average(recorder.steps, lambda u: 0.3))
    assert torch.equal(recorder.evaluated[-1]["last.bias"], averaged["last.bias"].bfloat16())
    assert same(bits(engine.model), recorder.steps[-1])


def test_a_parameter_whose_storage_was_replaced_is_still_followed(tmp_path: Path) -> None:
    class Replacer(Hook):
        def before_train_epoch(self, engine: Engine) -> None:
            for parameter in engine.model.parameters():
                parameter.data = parameter.data.clone()

    ema, recorder = EMAHook(momentum=0.3, warmup=False), Recorder()
    engine_of(tmp_path, {"replacer": Replacer(), "recorder": recorder, "ema": ema}).train()
    check(ema.state_dict()["averaged"], average(recorder.steps, lambda u: 0.3))


# Evaluation. ---------------------------------------------------------------------------------------------------------


def test_evaluation_runs_on_the_average_and_the_raw_bits_come_back(tmp_path: Path) -> None:
    ema = EMAHook()
    engine, recorder = run(tmp_path, ema, test=True)
    assert len(recorder.evaluated) == 4  # three validations and the test
    averaged = ema.state_dict()["averaged"]
    for evaluated in recorder.evaluated[-2:]:
        assert same({name: evaluated[name] for name in averaged}, averaged)
    for before, evaluated, after in zip(
        recorder.before_val_weights, recorder.evaluated[:3], recorder.after_val_weights, strict=True
    ):
        assert same(before, after)
        assert not same(before, evaluated)
    assert same(bits(engine.model), recorder.steps[-1])
    assert engine.optimizer.param_groups[0]["params"][0] is next(engine.model.parameters())


def test_with_weights_raw_evaluation_is_raw(tmp_path: Path) -> None:
    _, recorder = run(tmp_path, EMAHook(), test=True, weights="raw")
    for evaluated in recorder.evaluated[2:]:
        assert same(evaluated, recorder.steps[-1])


@pytest.mark.parametrize(("best", "averages"), [(1, False), (2, True)])
def test_the_best_checkpoint_and_what_is_published_are_raw_before_the_first_update(
    tmp_path: Path, best: int, averages: bool
) -> None:
    values = [0.1, 0.1, 0.1, 0.0]
    values[best - 1] = 0.9
    recorder = Recorder()
    checkpoint = CheckpointHook(save_best="acc", save_last=False, published_keys=["meta", "state_dict"])
    hooks = {"recorder": recorder, "ema": EMAHook(begin_iter=7), "checkpoint": checkpoint}
    engine_of(tmp_path, hooks, metrics={"acc": Scripted(values)}, test=True).train()
    saved = load(tmp_path / "checkpoints" / f"best_acc_epoch_{best}.pth")
    published = load(tmp_path / "checkpoints" / f"best_acc_epoch_{best}_published.pth")
    assert same(saved["state_dict"], recorder.steps[4 * best - 1]), "the raw weights are restored in any case"
    assert ("averaged_weights" in saved["meta"]) == averages == bool(saved["hooks"]["ema"]["averaged"])
    assert "averaged_weights" not in published["meta"]
    expected = {**saved["state_dict"], **saved["hooks"]["ema"]["averaged"]}
    assert same(published["state_dict"], expected)
    assert same(recorder.evaluated[best - 1], expected), "what was validated"
    assert same(recorder.evaluated[-1], expected), "what was tested"


class Failing(Hook):
    """Raises in the middle of the second validation, and looks at the weights when everything is over."""

    def __init__(self) -> None:
        self.at_the_end: Weights = {}

    def after_val_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        if engine.progress.epoch == 2:
            raise FloatingPointError

    def on_exception(self, engine: Engine, error: BaseException) -> None:
        self.at_the_end = bits(engine.model)


def test_the_raw_bits_come_back_when_a_validation_raises(tmp_path: Path) -> None:
    failing, recorder = Failing(), Recorder()
    hooks = {"recorder": recorder, "ema": EMAHook(), "failing": failing}
    engine = engine_of(tmp_path, hooks)
    with pytest.raises(FloatingPointError):
        engine.train()
    assert not same(recorder.evaluated[-1], recorder.steps[-1])
    assert same(failing.at_the_end, recorder.steps[-1])
    assert same(bits(engine.model), recorder.steps[-1])


# Saving. -------------------------------------------------------------------------------------------------------------


def test_a_checkpoint_has_raw_and_averaged_weights_and_says_where(tmp_path: Path) -> None:
    ema = EMAHook(begin_epoch=2)
    recorder = Recorder()
    engine_of(tmp_path, {"recorder": recorder, "ema": ema, "checkpoint": CheckpointHook()}).train()
    early, last = (load(tmp_path / "checkpoints" / f"epoch_{epoch}.pth") for epoch in (1, 3))
    assert "averaged_weights" not in early["meta"]
    assert early["hooks"]["ema"] == {"averaged": {}, "updates": 0, "begin": None}
    assert last["meta"]["averaged_weights"] == "ema"
    assert same(last["state_dict"], recorder.steps[-1])
    assert same(last["hooks"]["ema"]["averaged"], ema.state_dict()["averaged"])


@pytest.mark.parametrize(
    "options",
    [{}, {"update_buffers": True, "ema_type": "stochastic"}, {"begin_iter": 7}, {"begin_epoch": 2, "interval": 3}],
)
@pytest.mark.parametrize("at", [5, 8])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, options: dict[str, Any], at: int) -> None:
    whole = EMAHook(**options)
    run(tmp_path / "whole", whole)
    hooks = {
        "ema": EMAHook(**options),
        "stopper": Stopper(stop_at=at),
        "checkpoint": CheckpointHook(interval=None),
    }
    engine_of(tmp_path / "cut", hooks).train()
    (cut,) = (tmp_path / "cut" / "checkpoints").glob("*.pth")
    resumed = EMAHook(**options)
    hooks = {"ema": resumed, "stopper": Stopper(), "checkpoint": CheckpointHook(interval=None)}
    engine_of(tmp_path / "cut", hooks, resume=cut).train()
    assert resumed.updates == whole.updates
    assert same(resumed.state_dict()["averaged"], whole.state_dict()["averaged"])


def test_an_average_that_is_missing_is_an_error_unless_told_otherwise(tmp_path: Path) -> None:
    hooks = {"ema": EMAHook(), "checkpoint": CheckpointHook()}
    engine_of(tmp_path, hooks, max_epochs=1).train()
    resume = tmp_path / "checkpoints" / "epoch_1.pth"
    second = {"ema": EMAHook(update_buffers=True), "checkpoint": CheckpointHook()}
    with pytest.raises(UserError, match=r"hooks\.ema: .*1\.num_batches_tracked"):
        engine_of(tmp_path, second, max_epochs=2, resume=resume).train()
    third = {"ema": EMAHook(update_buffers=True), "checkpoint": CheckpointHook()}
    engine = engine_of(tmp_path, third, max_epochs=1, resume=resume, resume_strict=False)
    engine.train()
    averaged, saved = third["ema"].state_dict()["averaged"], load(resume)
    assert torch.equal(averaged["1.running_mean"], saved["state_dict"]["1.running_mean"])
    assert torch.equal(averaged["0.weight"], saved["hooks"]["ema"]["averaged"]["0.weight"])


# Mistakes. -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "settings", "key"),
    [
        ({"begin_epoch": 4}, {}, "begin_epoch"),
        ({"begin_epoch": 3, "interval": 4}, {"max_iters": 8}, "begin_epoch"),
        ({"begin_iter": 13}, {}, "begin_iter"),
        ({"begin_iter": 7}, {"accumulate": 3}, "begin_iter"),  # six optimizer steps in twelve iterations
        ({"by_epoch": True, "interval": 4}, {}, "interval"),
    ],
)
def test_a_run_that_ends_before_the_first_update_is_refused(
    tmp_path: Path, options: dict[str, Any], settings: dict[str, Any], key: str
) -> None:
    engine = engine_of(tmp_path, {"ema": EMAHook(**options)}, **settings)
    with pytest.raises(UserError, match="before the first update") as error:
        engine.train()
    assert error.value.key == f"hooks.ema.{key}"
    assert engine.progress.iteration == 0


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({"begin_epoch": 3, "by_epoch": True}, {}),
        ({"begin_epoch": 3, "interval": 4}, {"max_iters": 9}),
        ({"begin_iter": 6}, {"accumulate": 3}),
        ({"interval": 12}, {}),
        ({"interval": 4}, {"max_iters": 7, "accumulate": 2}),
    ],
)
def test_one_whose_last_step_is_the_first_update_is_not(
    tmp_path: Path, options: dict[str, Any], settings: dict[str, Any]
) -> None:
    ema = EMAHook(**options)
    run(tmp_path, ema, **settings)
    assert ema.updates == 1


# EMAHook's five types, and its warm-up, against the rules of where they come from, written out by han -----------------


Rule = Callable[[Tensor, Tensor, int], Tensor]
"""Maps (average, new value, `steps`) to the new average; `steps` as in mmengine: calls until now, also those without an
update."""


def exponential(momentum: float) -> Rule:
    """mmengine: averaged_param.lerp_(source_param, self.momentum)."""
    return lambda average, new, steps: (1 - momentum) * average + momentum * new


def warm(momentum: float) -> Rule:
    """TensorFlow: decay = min(decay, (1 + num_updates) / (10 + num_updates)); the share of the new is what is left."""

    def rule(average: Tensor, new: Tensor, steps: int) -> Tensor:
        decay = min(1 - momentum, (1 + steps) / (10 + steps))
        return decay * average + (1 - decay) * new

    return rule


def stochastic(interval: int) -> Rule:
    """mmengine: averaged_param.add_(source_param - averaged_param, alpha=1 / float(steps // self.interval + 1))."""
    return lambda average, new, steps: average + (new - average) / (steps // interval + 1)


def momentum_annealing(momentum: float, gamma: float) -> Rule:
    """mmengine: momentum = max(self.momentum, self.gamma / (self.gamma + self.steps)); lerp_."""

    def rule(average: Tensor, new: Tensor, steps: int) -> Tensor:
        share = max(momentum, gamma / (gamma + steps))
        return average + share * (new - average)

    return rule


def exp_momentum(momentum: float, gamma: float) -> Rule:
    """MMDetection: momentum = (1 - self.momentum) * math.exp(-float(1 + steps) / self.gamma) + self.momentum."""

    def rule(average: Tensor, new: Tensor, steps: int) -> Tensor:
        share = (1 - momentum) * math.exp(-float(1 + steps) / gamma) + momentum
        return (1 - share) * average + share * new

    return rule


def linear_momentum(momentum: float, warm_up_steps: int) -> Rule:
    """MMDetection: min(self.momentum**self.interval, (1 + x) / (warm_up_steps + x)), here without the power."""

    def rule(average: Tensor, new: Tensor, steps: int) -> Tensor:
        share = min(momentum, (1 + steps) / (warm_up_steps + steps))
        return (1 - share) * average + share * new

    return rule


def by_mmengine(weights: list[Weights], rule: Rule, interval: int) -> Weights:
    """`BaseAveragedModel.update_parameters`, called with each of them: the first is copied, each interval-th counts."""
    average: Weights = {}
    for steps, new in enumerate(weights):
        if steps == 0:
            average = {name: value.double() for name, value in new.items()}
        elif steps % interval == 0:
            average = {name: rule(value, new[name].double(), steps) for name, value in average.items()}
    return average


RULES: list[tuple[dict[str, Any], Rule]] = [
    ({"warmup": False}, exponential(0.0002)),
    ({"warmup": False, "momentum": 0.3}, exponential(0.3)),
    ({}, warm(0.0002)),
    ({"momentum": 0.5}, warm(0.5)),
    ({"ema_type": "stochastic"}, stochastic(1)),
    ({"ema_type": "momentum_annealing"}, momentum_annealing(0.0002, 100)),
    ({"ema_type": "momentum_annealing", "momentum": 0.3, "gamma": 1}, momentum_annealing(0.3, 1)),
    ({"ema_type": "exp_momentum"}, exp_momentum(0.0002, 2000)),
    ({"ema_type": "exp_momentum", "momentum": 0.1, "gamma": 5}, exp_momentum(0.1, 5)),
    ({"ema_type": "linear_momentum"}, linear_momentum(0.0002, 100)),
    ({"ema_type": "linear_momentum", "momentum": 0.5, "warm_up_steps": 4}, linear_momentum(0.5, 4)),
]


def averaged(run_dir: Path, **options: Any) -> tuple[Weights, list[Weights]]:
    """The averages that a run of twelve optimizer steps ends with, and its weights after each."""
    ema, recorder = EMAHook(**options), Recorder()
    engine_of(run_dir, {"recorder": recorder, "ema": ema}).train()
    assert len(recorder.steps) == 12
    return ema.state_dict()["averaged"], recorder.steps


def named(rules: list[tuple[dict[str, Any], Rule]]) -> list[Any]:
    """Test cases called after their options: the name of a function has its address in it."""
    return [pytest.param(options, rule, id=str(options)) for options, rule in rules]


@pytest.mark.parametrize(("options", "rule"), named(RULES))
def test_each_type_is_its_rule(tmp_path: Path, options: dict[str, Any], rule: Rule) -> None:
    averages, steps = averaged(tmp_path, **options)
    check(averages, by_mmengine(steps, rule, 1))


@pytest.mark.parametrize(
    ("options", "rule"),
    named(
        [
            ({"warmup": False, "momentum": 0.3}, exponential(0.3)),
            ({"ema_type": "stochastic"}, stochastic(4)),
            ({"ema_type": "exp_momentum", "gamma": 10}, exp_momentum(0.0002, 10)),
        ]
    ),
)
def test_with_an_interval_steps_count_and_not_updates(tmp_path: Path, options: dict[str, Any], rule: Rule) -> None:
    # With begin_iter the first update is at the same step there and here; without, there at 1 and here at 4.
    averages, steps = averaged(tmp_path, interval=4, begin_iter=3, **options)
    check(averages, by_mmengine(steps[2:], rule, 4))


def test_all_types_are_here() -> None:
    assert {options.get("ema_type", "exponential") for options, _ in RULES} == set(FORMULAS)


# A formula of the project (`weight`). -------------------------------------------------------------------------------


def decaying(average: Tensor, weights: Tensor, updates: int, power: float = 1.0) -> Tensor:
    """A function with an option."""
    return average.lerp(weights, (1 + updates) ** -power)


class Halves:
    """An object that is called."""

    def __call__(self, average: Tensor, weights: Tensor, updates: int) -> Tensor:
        return (average + weights) / 2


def in_place(average: Tensor, weights: Tensor, updates: int) -> None:
    """Changes the average, as MMEngine's `avg_func`."""
    average.lerp_(weights, 1 / (1 + updates))


@pytest.fixture(autouse=True)
def _trusted() -> None:
    """The parts are built without `hydraloop.build`, which trusts what the config was composed with."""
    ALLOWLIST.trust_folder(REPOSITORY)
    ALLOWLIST.trust(["tests"])


def from_config(*overrides: str) -> EMAHook:
    """The hook that a command line makes."""
    cfg = hydraloop.compose(["hooks=[ema]", *overrides], folder=REPOSITORY, trusted=["tests"])
    hook = build_hooks(cfg, several=False)[0]["ema"]
    assert isinstance(hook, EMAHook)
    return hook


def of(name: str) -> str:
    return f"+hooks.ema.weight._target_={__name__}.{name}"


@pytest.mark.parametrize(
    ("overrides", "rule"),
    [
        (
            [of("decaying"), "+hooks.ema.weight.power=0.5"],
            lambda average, new, updates: average + (new - average) / math.sqrt(1 + updates),
        ),
        ([of("Halves")], lambda average, new, updates: (average + new) / 2),
        ([of("in_place")], stochastic(1)),
        (
            [
                "+hooks.ema.weight._target_=torch.optim.swa_utils.get_ema_avg_fn",
                "+hooks.ema.weight.decay=0.75",
                "+hooks.ema.weight._partial_=false",
            ],
            exponential(0.25),
        ),
    ],
    ids=["with an option", "object", "in place", "torch's"],
)
def test_a_custom_formula_is_the_average(overrides: list[str], rule: Rule, tmp_path: Path) -> None:
    ema, recorder = from_config(*overrides), Recorder()
    engine_of(tmp_path, {"recorder": recorder, "ema": ema}, max_epochs=1).train()
    averages = ema.state_dict()["averaged"]
    assert averages
    check(averages, by_mmengine(recorder.steps, rule, 1))


def test_a_formula_with_an_option_that_it_replaces_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^hooks\.ema\.weight: replaces momentum, which is set, too"):
        from_config(of("Halves"), "hooks.ema.momentum=0.1")


# EMAHook on two ranks: one average, the same on both, of the whole model or of each rank's shards. --------------------


class Watcher(Hook):
    """Whole weights, on every rank: after each step, and in the last validation."""

    priority = 45

    def __init__(self) -> None:
        self.steps: list[Weights] = []
        self.evaluated: Weights = {}

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        if engine.stepper.stepped:
            self.steps.append(_whole(engine))

    def before_val_iter(self, engine: Engine, batch_idx: int, batch: Any) -> None:
        self.evaluated = _whole(engine)


def _whole(engine: Engine) -> Weights:
    return {name: whole(value).detach().clone() for name, value in engine.model.state_dict().items()}


def train_on_ranks(
    distributed: Distributed, run_dir: str, options: dict[str, Any], resume: str | None = None
) -> tuple[list[Weights], Weights, Weights, float]:
    """Weights after each step, evaluated ones, the averages, the last loss of a validation."""
    net = model()
    distributed.prepare(net)
    ema, watcher = EMAHook(momentum=0.3, warmup=False, **options), Watcher()
    hooks = {"watcher": watcher, "ema": ema, "checkpoint": CheckpointHook()}
    mine = batches(8)[distributed.rank :: 2]
    path = None if resume is None else Path(resume)
    engine = engine_of(
        Path(run_dir), hooks, net=net, train=mine, distributed=distributed, accumulate=3, max_epochs=3, resume=path
    )
    engine.train()
    averages = {name: whole(value).clone() for name, value in ema.state_dict()["averaged"].items()}
    return watcher.steps, watcher.evaluated, averages, engine.metrics["loss"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("update_buffers", [False, True])
def test_two_ranks_have_one_average(tmp_path: Path, strategy: str, update_buffers: bool) -> None:
    ranks = on_ranks(2, train_on_ranks, str(tmp_path), {"update_buffers": update_buffers}, strategy=strategy)
    parameters = {name for name, _ in model().named_parameters()}
    for steps, evaluated, averages, _ in ranks:
        assert len(steps) == 6  # windows of 3 in epochs of 4
        check({name: averages[name] for name in parameters}, average(steps, lambda u: 0.3))
        assert same({name: evaluated[name] for name in parameters}, {name: averages[name] for name in parameters})
    assert same(ranks[0][1], ranks[1][1]), "what is evaluated is the same, buffers too"
    assert ranks[0][3] == ranks[1][3]
    saved = load(tmp_path / "checkpoints" / "epoch_3.pth")
    assert same(saved["hooks"]["ema"]["averaged"], ranks[0][2]), "whole, and rank 0's buffers"
    assert ("1.running_mean" in ranks[0][2]) == update_buffers
    assert same({n: saved["state_dict"][n] for n in parameters}, {n: ranks[0][0][-1][n] for n in parameters}), "raw"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_resume_with_it(tmp_path: Path, strategy: str) -> None:
    options = {"update_buffers": True}
    whole_run = on_ranks(2, train_on_ranks, str(tmp_path / "whole"), options, strategy=strategy)
    resume = str(tmp_path / "whole" / "checkpoints" / "epoch_2.pth")
    resumed = on_ranks(2, train_on_ranks, str(tmp_path / "resumed"), options, resume, strategy=strategy)
    assert same(resumed[0][2], whole_run[0][2])
    for before, after in zip(whole_run, resumed, strict=True):
        assert same(before[1], after[1])
        assert before[3] == after[3]
