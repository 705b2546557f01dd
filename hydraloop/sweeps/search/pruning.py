"""Pruning: whether a trial ends after a validation, because others are better.

A curve has the values of one trial by the number of the validation, counted from 1. Call a function once for each
validation of a trial, in order, with the trial's curve until that validation. Nothing here has a state: the same
arguments give the same answer. A call looks at one value of each other trial: 1 ms of a CPU for 1,000 trials.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Mapping
from functools import cache
from statistics import median

from hydraloop.sweeps.search.asha import Rule, rungs

Curve = Mapping[int, float]

STUDY_NAME = "hydraloop"
"""Stands for the name of Optuna's study, from which `HyperbandPruner` draws the bracket of a trial."""


def median_prunes(curve: Curve, others: Collection[Curve], rule: Rule, *, startup: int = 5, warmup: int = 1) -> bool:
    """Return whether the best value of a trial is worse than the median of the other trials.

    Decides as Optuna's `MedianPruner(startup, warmup)` whose steps are validations. The best value of the trial until
    now is compared with the median of the values that the others had at the same validation. NaN is left out of both. A
    trial that has had only NaN is pruned. No trial is pruned at a validation at which no other trial has a number.

    Args:
        curve: the trial.
        others: the trials that have trained to their end with a result. Running, pruned and failed trials do not count.
        startup: nothing is pruned before so many others have ended.
        warmup: the first validation after which a trial can be pruned.
    """
    if not curve or len(others) < max(startup, 1) or max(curve) < warmup:
        return False
    own = [value for value in curve.values() if not math.isnan(value)]
    if not own:
        return True
    last = max(curve)
    same = [other[last] for other in others if last in other and not math.isnan(other[last])]
    if not same:
        return False
    return max(own) < median(same) if rule == "greater" else min(own) > median(same)


def hyperband_prunes(
    number: int,
    curve: Curve,
    curves: Mapping[int, Curve],
    rule: Rule,
    *,
    validations: int,
    smallest: int = 1,
    eta: int = 3,
) -> bool:
    """Return whether a trial is not among the best `1 / eta` of its bracket at a rung that it has just reached.

    Decides as Optuna's `HyperbandPruner(smallest, validations, eta)` in a study with the name `STUDY_NAME`. While a
    rung has fewer than `eta` trials, its best trial continues. A trial with NaN at a rung is pruned. Sources: Li et
    al., "Hyperband", JMLR 2018, and Li et al., "A System for Massively Parallel Hyperparameter Tuning", MLSys 2020.

    Differences from Optuna:

    - A trial is not pruned after its last validation, because it has ended.
    - A rung has the values of all trials that were validated there. Optuna stores the values of a rung. So it leaves
      out a trial that trained on after it was to be pruned at an earlier rung.
    - Brackets are counted with integers. Optuna rounds a logarithm: it has one bracket less for some lengths, as 243.

    Args:
        number: the trial. It decides the bracket.
        curve: its values.
        curves: those of all other trials by number, also of running, pruned and failed ones.
        validations: length of a whole run.
        smallest: the first rung of the first bracket, in validations.
        eta: one of `eta` trials continues.
    """
    brackets = len(rungs(validations + 1, smallest, eta))
    last = max(curve, default=0)
    if last not in rungs(validations, smallest, eta):
        return False
    bracket = _bracket(number, brackets, eta)
    if last < smallest * eta**bracket:
        return False
    if math.isnan(curve[last]):
        return True
    sign = -1 if rule == "greater" else 1
    values = [sign * curve[last]]
    for other, its in curves.items():
        if last in its and not math.isnan(its[last]) and _bracket(other, brackets, eta) == bracket:
            values.append(sign * its[last])
    return values[0] > sorted(values)[max(len(values) // eta, 1) - 1]


@cache  # asked for each other trial at each rung
def _bracket(number: int, brackets: int, eta: int) -> int:
    """Return the bracket of a trial. Bracket `s` has its first rung after `smallest * eta**s` validations."""
    shares = [-(-brackets * eta**s // (s + 1)) for s in reversed(range(brackets))]
    drawn = zlib.crc32(f"{STUDY_NAME}_{number}".encode()) % sum(shares)
    return next(s for s in range(brackets) if drawn < sum(shares[: s + 1]))
