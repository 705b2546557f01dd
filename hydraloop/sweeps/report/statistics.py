"""Averages of jobs that differ only in their seed, and which of them differ by more than chance. Imports no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from importlib.util import find_spec

FEWEST = 5
"""Results of a group that are needed to compare it. With fewer, the test finds only very large differences."""
MOST = 200
"""Groups that are compared with each other. More have 20,000 pairs, of which a correction leaves few."""
LEVEL = 0.05
"""Groups are called different below this p: in at most 5 % of sweeps whose axes have no effect."""


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and the standard deviation of a sample; a single value has no deviation.

    Both are NaN if a value is not finite: a job that has diverged must not be left out of an average.
    """
    if not all(map(math.isfinite, values)):
        return math.nan, math.nan
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def is_unavailable() -> bool:
    """Return whether the package is missing that has the test."""
    return find_spec("scipy") is None


def compare(groups: Sequence[Sequence[float]]) -> list[list[float]] | None:
    """Return the p-values of all pairs by Welch's t-test, with Holm's correction for the number of pairs.

    A pair is NaN, and is not counted, if a group has fewer than FEWEST values or one that is not finite, or if neither
    group has any variance: then chance has no part in the results, or the seed has no effect. None: there is no pair,
    there are more than MOST groups, or scipy is not installed.
    """
    able = [index for index, group in enumerate(groups) if len(group) >= FEWEST and all(map(math.isfinite, group))]
    if not 2 <= len(able) <= MOST:
        return None
    import numpy as np

    if is_unavailable():
        return None
    from scipy.stats import ttest_ind_from_stats  # 1.2 s

    means = np.array([statistics.fmean(groups[index]) for index in able])
    deviations = np.array([statistics.stdev(groups[index]) for index in able])
    counts = np.array([len(groups[index]) for index in able])
    first, second = np.triu_indices(len(able), 1)
    varied = np.maximum(deviations[first], deviations[second]) > 0
    first, second = first[varied], second[varied]
    if not len(first):
        return None
    sides = [part[side] for side in (first, second) for part in (means, deviations, counts)]
    p = ttest_ind_from_stats(*sides, equal_var=False).pvalue
    order = np.argsort(p)
    corrected = np.empty_like(p)
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)))
    result = np.full((len(groups), len(groups)), np.nan)
    rows, columns = np.array(able)[first], np.array(able)[second]
    result[rows, columns] = result[columns, rows] = corrected
    found: list[list[float]] = result.tolist()
    return found
