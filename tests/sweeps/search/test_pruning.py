from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Literal

import optuna
import pytest
from optuna.trial import TrialState

from hydraloop.sweeps.search.pruning import STUDY_NAME, Curve, hyperband_prunes, median_prunes

Rule = Literal["greater", "less"]
RULES: tuple[Rule, ...] = ("greater", "less")
NAN = math.nan


def decisions(
    pruner: optuna.pruners.BasePruner,
    rule: Rule,
    validations: int,
    prunes: Callable[[int, Curve, dict[int, Curve], list[Curve]], bool],
) -> list[tuple[int, int, bool, bool]]:
    """Run 200 random curves, six at a time, and return (trial, validation, what Optuna decides, what `prunes` decides).

    Values are rounded, so that some are equal, and 4 % are NaN. A trial that Optuna prunes ends. `prunes` gets the
    number of the trial, its curve, the other curves, and the curves of the trials that have ended with a result.
    """
    drawn = random.Random(f"{rule} {validations}")
    direction = "maximize" if rule == "greater" else "minimize"
    study = optuna.create_study(study_name=STUDY_NAME, direction=direction, pruner=pruner)
    curves: dict[int, Curve] = {}
    ended: list[Curve] = []
    running: list[tuple[optuna.Trial, float, dict[int, float]]] = []
    found = []
    while len(curves) < 200 or running:
        if len(curves) < 200 and len(running) < 6:
            trial = study.ask()
            curve: dict[int, float] = {}
            curves[trial.number] = curve
            running.append((trial, drawn.gauss(0, 1), curve))
            continue
        trial, level, curve = one = drawn.choice(running)
        last = len(curve) + 1
        curve[last] = NAN if drawn.random() < 0.04 else round(level + drawn.gauss(0, 0.5), 1)
        trial.report(curve[last], last)
        if last < validations:
            others = {number: other for number, other in curves.items() if number != trial.number}
            theirs = trial.should_prune()
            found.append((trial.number, last, theirs, prunes(trial.number, curve, others, ended)))
            if theirs:
                study.tell(trial, state=TrialState.PRUNED)
                running.remove(one)
        elif math.isnan(curve[last]):
            study.tell(trial, state=TrialState.FAIL)
            running.remove(one)
        else:
            study.tell(trial, curve[last])
            ended.append(curve)
            running.remove(one)
    return found


def check_equal(found: list[tuple[int, int, bool, bool]]) -> None:
    assert [one for one in found if one[2] != one[3]] == []
    assert 20 < sum(theirs for _, _, theirs, _ in found) < 195  # both answers are frequent


@pytest.fixture(autouse=True)
def quiet() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # numpy, which Optuna asks
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("startup", "warmup"), [(5, 1), (0, 3)])
def test_median_decides_as_optuna(rule: Rule, startup: int, warmup: int) -> None:
    check_equal(
        decisions(
            optuna.pruners.MedianPruner(startup, warmup),
            rule,
            10,
            lambda number, curve, curves, ended: median_prunes(curve, ended, rule, startup=startup, warmup=warmup),
        )
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("validations", "smallest", "eta"), [(9, 1, 3), (20, 2, 2), (30, 1, 3), (4, 4, 3)])
def test_hyperband_decides_as_optuna(rule: Rule, validations: int, smallest: int, eta: int) -> None:
    found = decisions(
        optuna.pruners.HyperbandPruner(smallest, validations, eta),
        rule,
        validations,
        lambda number, curve, curves, ended: hyperband_prunes(
            number, curve, curves, rule, validations=validations, smallest=smallest, eta=eta
        ),
    )
    if validations == smallest:
        assert not any(theirs or ours for _, _, theirs, ours in found)  # the only rung is the end
    else:
        check_equal(found)


def test_a_trial_without_a_number_is_pruned_by_the_median_and_one_before_the_warmup_is_not() -> None:
    others = [{1: 1.0, 2: 2.0}] * 5
    assert median_prunes({1: NAN}, others, "greater")
    assert not median_prunes({1: NAN}, others[:4], "greater")
    assert not median_prunes({1: 0.0}, others, "greater", warmup=2)
    assert median_prunes({1: 0.0, 2: 1.0}, others, "greater", warmup=2)
    assert not median_prunes({}, others, "greater")
    assert not median_prunes({1: NAN}, [], "greater", startup=0)
    assert not median_prunes({1: 0.0, 2: 0.0, 3: 0.0}, others, "greater")  # nothing to compare with


def test_brackets_are_counted_exactly() -> None:
    """Optuna has no bracket for trials that first meet others after 243 validations: it rounds log(243, 3) to 4.999…"""
    better = {number: dict.fromkeys(range(1, 244), 0.0) for number in range(1000, 1200)}
    pruned = {
        number
        for number in range(1000)
        for last in (1, 3, 9, 27, 81)
        if hyperband_prunes(number, {last: 1.0}, better, "less", validations=243)
    }
    assert 950 < len(pruned) < 1000


def test_hyperband_does_not_prune_a_trial_that_has_ended() -> None:
    better = {number: dict.fromkeys(range(1, 10), 0.0) for number in range(100, 200)}
    for number in range(100):
        assert hyperband_prunes(number, {9: 1.0}, better, "less", validations=10)
        assert not hyperband_prunes(number, {9: 1.0}, better, "less", validations=9)
        assert not hyperband_prunes(number, {8: 1.0}, better, "less", validations=10)
    assert not hyperband_prunes(0, {}, better, "less", validations=10)
