"""Welch's t-test of all pairs with Holm's correction."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest

from hydraloop.sweeps.report.statistics import LEVEL, compare, mean_and_deviation

GROUPS = ([0.90, 0.91, 0.92, 0.93, 0.94], [0.91, 0.90, 0.93, 0.95, 0.96, 0.92], [0.80, 0.82, 0.84, 0.86, 0.89])


def test_pairs_are_those_of_scipy_with_the_steps_of_holm() -> None:
    p = compare(GROUPS)
    assert p is not None
    from scipy.stats import ttest_ind  # here, because it takes a second in each process that collects the tests

    raw = {(a, b): ttest_ind(GROUPS[a], GROUPS[b], equal_var=False).pvalue for a, b in ((0, 1), (0, 2), (1, 2))}
    smallest, middle, largest = sorted(raw, key=raw.__getitem__)
    expected = {smallest: 3 * raw[smallest]}
    expected[middle] = max(expected[smallest], 2 * raw[middle])
    expected[largest] = max(expected[middle], raw[largest])
    for (a, b), value in expected.items():
        assert p[a][b] == p[b][a] == pytest.approx(value, rel=1e-12)
    assert all(math.isnan(p[a][a]) for a in range(3))


def test_without_scipy_nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    assert compare(GROUPS) is None


def test_what_cannot_be_compared_is_not_counted() -> None:
    few, diverged, equal = [0.1] * 4, [0.1, 0.2, 0.3, 0.4, math.nan], [0.5] * 5
    alone = compare(GROUPS[:2])
    p = compare([few, GROUPS[0], diverged, GROUPS[1]])
    assert alone is not None
    assert p is not None
    assert p[1][3] == alone[0][1]
    assert sum(not math.isnan(value) for row in p for value in row) == 2
    assert compare([few, few]) is compare([GROUPS[0], diverged]) is compare([]) is None
    assert compare([equal, [0.6] * 5]) is None, "neither varies"
    assert compare([equal, GROUPS[2]]) is not None
    assert compare([*GROUPS] * 67) is None, "too many pairs"


@pytest.mark.parametrize("groups", [2, 4])
def test_of_1000_sweeps_without_an_effect_at_most_5_percent_are_called_different(groups: int) -> None:
    draws = np.random.default_rng(0).normal(size=(1000, groups, 5)).tolist()
    called = sum(any(value < LEVEL for row in compare(sweep) or () for value in row) for sweep in draws)
    assert 10 <= called <= 50, "fewer than 1 % would be a test that finds nothing"


def test_an_effect_is_found() -> None:
    draws = np.random.default_rng(0).normal(size=(100, 4, 5))
    draws[:, 3] += 4
    assert sum((compare(sweep) or [[0]])[0][-1] < LEVEL for sweep in draws.tolist()) > 90


def test_mean_and_deviation() -> None:
    assert mean_and_deviation([1.0, 2.0, 4.0]) == pytest.approx((7 / 3, math.sqrt(7 / 3)))
    assert mean_and_deviation([1.0]) == (1.0, None)
    for value in (math.nan, math.inf):
        assert all(map(math.isnan, map(float, mean_and_deviation([1.0, value]))))  # type: ignore[arg-type]
