"""ASHA: which paused trial of a search continues (`sweep.promote=asha`).

Li et al., A System for Massively Parallel Hyperparameter Tuning, 2020, Algorithm 2.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from hydraloop.sweeps.search import Rule
from hydraloop.sweeps.search_history import History, Trial

ETA = 3
"""One of so many trials of a rung continues."""


def promotion(
    results: Sequence[Mapping[int, float]], promoted: Sequence[Collection[int]], rule: Rule
) -> tuple[int, int] | None:
    """Return the (rung, trial) to continue next, or None if a new trial is to start.

    The best `len(results[k]) // ETA` trials of rung `k` are promoted. The highest rung comes first, and in it the best
    trial. Of trials with equal values, the one with the lower number is better. A trial with NaN is not promoted.

    Args:
        results: the value of each trial that has reached a rung, by number, for each rung.
        promoted: the trials that were promoted from each rung.
    """
    for rung in reversed(range(len(results))):
        for trial in _best(results[rung], len(results[rung]) // ETA, rule):
            if trial not in promoted[rung]:
                return rung, trial
    return None


def next_promoted(history: History, *, is_last: bool) -> Trial | None:
    """Return the paused trial that continues; None if there is none.

    Args:
        is_last: whether no other trial runs or is to start. Then, if no trial has trained to its end, the best one of
            the highest rung continues.
    """
    trials = history.trials
    paused = [one for one in trials if one.state == "paused"]
    if not paused or not history.rules:
        return None
    rule = history.rules[0]
    results: list[dict[int, float]] = []
    promoted: list[set[int]] = []
    for rung in range(1, 1 + max(len(one.curve) for one in trials)):
        reached = {one.number: one.curve[rung] for one in trials if len(one.curve) >= rung}
        waiting = {one.number for one in paused if len(one.curve) == rung}
        results.append(reached)
        promoted.append(set(reached) - waiting)
    found = promotion(results, promoted, rule)
    if found is not None:
        return trials[found[1]]
    if not is_last or any(one.state == "complete" for one in trials):
        return None
    highest = max(len(one.curve) for one in paused)
    values = {one.number: one.curve[highest] for one in paused if len(one.curve) == highest}
    return trials[next(iter(_best(values, 1, rule)), min(values))]


def _best(values: Mapping[int, float], count: int, rule: Rule) -> list[int]:
    """Return at most `count` trials of a rung, the best one first, without those that have NaN."""
    sign = -1 if rule == "greater" else 1
    numbers = sorted((sign * value, trial) for trial, value in values.items() if not math.isnan(value))
    return [trial for _, trial in numbers[:count]]
