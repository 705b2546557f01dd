"""Asynchronous successive halving (ASHA): a trial pauses at each rung, and continues when it is promoted.

Source: Li et al., "A System for Massively Parallel Hyperparameter Tuning", MLSys 2020, algorithm 2, with one bracket.
Rungs are counted from 0. A trial that leaves the last rung trains to its end. Syne Tune's ASHA (0.13,
`PromotionRungSystem`) decides the same, except that up to one more trial of a rung may leave it: it compares with an
interpolated quantile, where the paper counts `n // eta`.

`results[k][trial]` is the value that a trial had at rung `k`. `promoted[k]` names the trials that have been promoted
out of rung `k`, also if they run or have failed since. Both have one entry for each rung. A trial is paused at rung `k`
if it has a value there and has not been promoted out of it. A trial with NaN is not promoted.

Nothing here has a state: the same arguments give the same answer. A call sorts each rung: at most 10 ms of a CPU
with 10,000 trials.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from hydraloop.sweeps.search.settings import Rule


def rungs(validations: int, smallest: int = 1, eta: int = 3) -> tuple[int, ...]:
    """Return the validations, counted from 1, at which a trial pauses: `smallest * eta**k` below `validations`.

    Args:
        validations: length of a whole run. Its last validation is not a rung.
        smallest: the first rung, at least 1.
        eta: one of `eta` trials continues, at least 2.
    """
    found = []
    while smallest < validations:
        found.append(smallest)
        smallest *= eta
    return tuple(found)


def promotion(
    results: Sequence[Mapping[int, float]], promoted: Sequence[Collection[int]], rule: Rule, eta: int = 3
) -> tuple[int, int] | None:
    """Return the (rung, trial) to continue next, or None if a new trial is to start.

    The best `len(results[k]) // eta` trials of rung `k` may leave it. The highest rung comes first, and in it the best
    trial. Of trials with equal values, the one with the lower number is better.
    """
    for rung in reversed(range(len(results))):
        paused = _paused(rung, results, promoted)
        for trial in _best(results[rung], len(results[rung]) // eta, rule):
            if trial in paused:
                return rung, trial
    return None


def _best(values: Mapping[int, float], count: int, rule: Rule) -> list[int]:
    """Return at most `count` trials of a rung, the best one first, without those that have NaN."""
    sign = -1 if rule == "greater" else 1
    numbers = sorted((sign * value, trial) for trial, value in values.items() if not math.isnan(value))
    return [trial for _, trial in numbers[:count]]


def _paused(rung: int, results: Sequence[Mapping[int, float]], promoted: Sequence[Collection[int]]) -> set[int]:
    """Return the trials of a rung that have not left it. A trial with a value at the next rung has left."""
    return set(results[rung]).difference(promoted[rung], *results[rung + 1 : rung + 2])
