from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from hydraloop.sweeps.search.asha import promotion, rungs

Rule = Literal["greater", "less"]
NAN = math.nan


def test_rungs_are_powers_below_the_whole_run() -> None:
    assert rungs(27) == (1, 3, 9)
    assert rungs(28) == (1, 3, 9, 27)
    assert rungs(20, smallest=2, eta=2) == (2, 4, 8, 16)
    assert rungs(1) == rungs(5, smallest=5) == ()


def test_the_highest_rung_and_its_best_trial_come_first() -> None:
    results = [{0: 5.0, 1: 3.0, 2: 4.0, 3: 1.0, 4: 2.0, 5: 6.0}, {3: 1.0, 4: 0.5, 1: 2.0}]
    assert promotion(results, [{3, 4, 1}, set()], "less") == (1, 4)
    assert promotion(results, [{3, 4, 1}, set()], "greater") == (1, 1)
    assert promotion(results, [{3, 4, 1}, {1}], "greater") == (0, 5)  # the best 6 // 3 are 5 and 0
    assert promotion(results, [{3, 4, 1, 5}, {1}], "greater") == (0, 0)
    assert promotion(results, [{3, 4, 1, 5, 0}, {1}], "greater") is None
    assert promotion([{0: 1.0, 1: 1.0}], [set()], "less") is None
    assert promotion([], [], "less") is None


def test_a_trial_at_the_next_rung_has_been_promoted() -> None:
    assert promotion([{0: 1.0, 1: 2.0, 2: 3.0}, {0: 1.0}], [(), ()], "less") is None


def test_equal_values_are_ordered_by_trial_and_nan_is_not_promoted() -> None:
    assert promotion([{2: 1.0, 0: NAN, 1: 1.0}], [()], "greater") == (0, 1)
    assert promotion([{2: NAN, 0: NAN, 1: math.inf}], [()], "less") == (0, 1)
    assert promotion([{2: NAN, 0: NAN, 1: NAN}], [()], "less") is None


def test_a_search_that_is_shortened_still_promotes_what_its_rungs_allow() -> None:
    results, promoted = [{trial: float(trial) for trial in range(6)}], [{0}]
    assert promotion(results, promoted, "less") == (0, 1)


@dataclass
class Search:
    """A search of `total` trials: what runs, what paused, and what each free slot has done."""

    total: int
    count: int
    """of rungs"""
    rule: Rule
    eta: int
    results: list[dict[int, float]] = field(default_factory=list)
    promoted: list[set[int]] = field(default_factory=list)
    running: list[tuple[int, int]] = field(default_factory=list)
    """(trial, rung that it will reach)"""
    lost: set[int] = field(default_factory=set)
    started: int = 0

    def __post_init__(self) -> None:
        self.results = self.results or [{} for _ in range(self.count)]
        self.promoted = self.promoted or [set() for _ in range(self.count)]

    def ask(self) -> tuple[int, int] | None:
        """Fill one slot. Returns the (rung, trial) that was promoted, (-1, trial) for a new one, None at the end."""
        chosen = promotion(self.results, self.promoted, self.rule, self.eta)
        if chosen is not None:
            self.promoted[chosen[0]].add(chosen[1])
        elif self.started < self.total:
            chosen = (-1, self.started)
            self.started += 1
        else:
            return None
        self.running.append((chosen[1], chosen[0] + 1))
        return chosen

    def end(self, trial: int, rung: int, value: float | None) -> None:
        """Let a running trial reach a rung. None: it fails on the way."""
        self.running.remove((trial, rung))
        if value is None:
            self.lost.add(trial)
        elif rung < self.count:
            self.results[rung][trial] = value


VALUES: dict[str, Callable[[random.Random, int], float | None]] = {
    "random": lambda drawn, event: drawn.gauss(0, 1),
    "equal": lambda drawn, event: float(drawn.randrange(3)),
    "rising": lambda drawn, event: event + drawn.random() * 3,
    "falling": lambda drawn, event: -event - drawn.random() * 3,
    "failing": lambda drawn, event: drawn.choice([None, NAN, math.inf, drawn.random(), drawn.random()]),
}


def searches(count: int) -> Iterator[tuple[random.Random, Search, int, Callable[[int], float | None]]]:
    """Return random searches: (numbers, search, slots, value of the trial that ends at an event)."""
    for seed in range(count):
        drawn = random.Random(seed)
        value = VALUES[list(VALUES)[seed % len(VALUES)]]
        rule: Rule = drawn.choice(["greater", "less"])
        search = Search(drawn.randint(1, 60), drawn.randint(1, 4), rule, drawn.randint(2, 4))
        yield drawn, search, drawn.randint(1, 9), lambda event, drawn=drawn, value=value: value(drawn, event)


def paper(results: list[dict[int, float]], promoted: list[set[int]], rule: Rule, eta: int) -> tuple[int, int] | None:
    """Algorithm 2 of Li et al., `get_job`, line by line. top_k(rung k, n) are the n best of rung k."""

    def top_k(rung: dict[int, float], n: int) -> list[int]:
        found: list[int] = []
        left = {trial: value for trial, value in rung.items() if value == value}
        while left and len(found) < n:
            best = max(left.values()) if rule == "greater" else min(left.values())
            found.append(min(trial for trial, value in left.items() if value == best))
            del left[found[-1]]
        return found

    for k in range(len(results) - 1, -1, -1):  # for k = ⌊log_η(R/r)⌋ - s - 1, …, 1, 0
        candidates = top_k(results[k], len(results[k]) // eta)  # candidates = top_k(rung k, |rung k|/η)
        promotable = [
            t for t in candidates if t not in promoted[k]
        ]  # {t for t in candidates if t not already promoted}
        if len(promotable) > 0:
            return k, promotable[0]
    return None  # draw a random configuration


def test_decisions_are_those_of_the_paper() -> None:
    decided = promotions = 0
    for drawn, search, slots, value in searches(60):
        while True:
            expected = paper(search.results, search.promoted, search.rule, search.eta)
            if len(search.running) < slots:
                chosen = search.ask()
                assert chosen == expected or (expected is None and (chosen is None or chosen[0] == -1))
                decided, promotions = decided + 1, promotions + (expected is not None)
                if chosen is not None:
                    continue
            if not search.running:
                break
            search.end(*drawn.choice(search.running), value(decided))
    assert promotions > 400


def test_more_trials_than_one_of_eta_can_leave_a_rung() -> None:
    """Each trial is the best when it arrives. So a bound of total // eta**k at rung k would be wrong."""
    search = Search(total=12, count=2, rule="greater", eta=3)
    while (chosen := search.ask()) is not None:
        search.end(*search.running[0], float(chosen[1]))
    assert len(search.promoted[0]) == 10
    assert len(search.promoted[1]) == 8
