"""EMAHook's five types, and its warm-up, against the rules of where they come from, written out by hand.

The sources, read for this: mmengine 0.10.7, `mmengine/model/averaged_model.py` (`BaseAveragedModel.update_parameters`,
`ExponentialMovingAverage`, `StochasticWeightAverage`, `MomentumAnnealingEMA`); MMDetection 3.3, `mmdet/models/layers/
ema.py` (`ExpMomentumEMA`); MMDetection 2.28, `mmdet/core/hook/ema.py` (`LinearMomentumEMAHook`); for the warm-up
TensorFlow's `ExponentialMovingAverage` with `num_updates`: decay = min(decay, (1 + n) / (10 + n)).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import hydraloop
from hydraloop.errors import UserError
from hydraloop.hooks.build_from_config import build_hooks
from hydraloop.hooks.ema import FORMULAS, EMAHook
from hydraloop.safety.allowlist import ALLOWLIST
from tests.config.composed import REPOSITORY
from tests.hooks.test_ema import Recorder, check
from tests.hooks.tiny_runs import engine_of

Weights = dict[str, Tensor]
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
