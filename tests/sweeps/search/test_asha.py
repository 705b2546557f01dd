from __future__ import annotations

import math
import random
from collections.abc import Callable

from hydraloop.sweeps.job_source import ETA, promotion
from hydraloop.sweeps.search import Rule

NAN = math.nan


VALUES: list[Callable[[random.Random, int], float]] = [
    lambda drawn, event: drawn.gauss(0, 1),
    lambda drawn, event: float(drawn.randrange(3)),
    lambda drawn, event: event + drawn.random() * 3,
    lambda drawn, event: drawn.choice([NAN, math.inf, drawn.random(), drawn.random()]),
]


def paper(results: list[dict[int, float]], promoted: list[set[int]], rule: Rule) -> tuple[int, int] | None:
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
        candidates = top_k(results[k], len(results[k]) // ETA)  # candidates = top_k(rung k, |rung k|/η)
        promotable = [t for t in candidates if t not in promoted[k]]  # t for t in candidates if t not already promoted
        if len(promotable) > 0:
            return k, promotable[0]
    return None  # draw a random configuration


def test_decisions_are_those_of_the_paper() -> None:
    """In searches of 60 trials with several slots, whose trials reach rungs in any order."""
    promotions = 0
    for seed in range(40):
        drawn, value, rungs = random.Random(seed), VALUES[seed % len(VALUES)], 1 + seed % 4
        rule: Rule = drawn.choice(["greater", "less"])
        results, promoted = [dict[int, float]() for _ in range(rungs)], [set[int]() for _ in range(rungs)]
        running, asked, slots = list[tuple[int, int]](), 0, drawn.randint(1, 9)
        while running or asked < 60:
            chosen = promotion(results, promoted, rule)
            assert chosen == paper(results, promoted, rule)
            if len(running) < slots and (chosen or asked < 60):
                rung, trial = chosen or (-1, asked)
                asked += chosen is None
                if chosen:
                    promoted[rung].add(trial)
                    promotions += 1
                running.append((trial, rung + 1))
                continue
            trial, rung = running.pop(drawn.randrange(len(running)))
            if rung < rungs:
                results[rung][trial] = value(drawn, asked)
    assert promotions > 400
