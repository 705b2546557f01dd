"""EMAHook on real runs, compared with averages in plain torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn.utils import parametrizations, parametrize, prune

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.precision import FP16
from hydraloop.errors import UserError
from hydraloop.hooks.checkpoint import CheckpointHook
from hydraloop.hooks.ema import FORMULAS, EMAHook
from tests.hooks.tiny_runs import Scripted, Stopper, batches, bits, engine_of, load, same

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
