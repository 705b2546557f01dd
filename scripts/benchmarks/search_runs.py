"""Real searches that confirm the recorded curves: ASHA that continues, beside random search.

    python scripts/benchmarks/search_runs.py [digits char_lm mlp] [--rounds 1] [--best]

A round has a seed. Its random search trains 64 trials in full. The target is the median of its best loss after 32
trials, over the orders of the 64; what it needs to reach the target is the median over the same orders. ASHA then
has 256 trials. Counted are the iterations that all of its trials have validated when a complete trial reaches the
target, as on the tables.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
from measure import goal, project, row, table
from search_simulation import TRIALS
from search_space import EPOCHS, SPACES, Log
from search_tables import OVERRIDES, USUAL
from sweeps import sweep

COMPLETE = 2 * TRIALS
"""Trials of the random search."""
ORDERS = 200


class Curve(NamedTuple):
    """What a trial has validated."""

    losses: list[float]
    """The last ones, or the best ones until then."""
    iterations: list[int]
    times: list[float]


def main() -> None:
    """Print a table for each task."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tasks", nargs="*", default=[*SPACES], help="default: all")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--best", action="store_true", help="the value of a trial is its best loss, not its last one")
    options = parser.parse_args()
    for task in options.tasks:
        compare(task, options.rounds, best=options.best)


def compare(task: str, rounds: int, *, best: bool) -> None:
    """Print how many iterations both searches need."""
    table(task, "target", "random search, iterations", "ASHA that continues", "to random search")
    found = []
    for seed in range(1, rounds + 1):
        target, needed = _target(_searched(task, seed, f"sweep.trials={COMPLETE}", best=best))
        line = ("sweep.promote=asha", f"sweep.trials={4 * COMPLETE}")
        spent = _spent(_searched(task, seed, *line, best=best), target)
        found.append(spent / needed)
        row(f"seed {seed}", f"{target:.5g}", f"{needed:,.0f}", f"{spent:,.0f}", f"{found[-1]:.2f}")
    goal("its iterations to those of random search", found, most=0.33)


def _searched(task: str, seed: int, *line: str, best: bool) -> list[Curve]:
    """Return the curves of a search, in the order of its trials."""
    space = [f"{key}={_values(values)}" for key, values in SPACES[task].items()]
    line += (*OVERRIDES[task], *USUAL, *space, f"seed={seed}", "sweep.objectives={loss: min}")
    line += ("sweep.sampler=random", "sweep.max_workers=4")
    if best:
        line += ("default_hooks.checkpoint.save_best=loss",)
    with tempfile.TemporaryDirectory() as folder:
        sweep(project(Path(folder)), *line)
        files = Path(folder, "all").glob("*/metrics.jsonl")
        return [_curve(file, best=best) for file in sorted(files, key=lambda file: int(file.parent.name))]


def _values(values: Log | list[object]) -> str:
    if isinstance(values, Log):
        return f"tag(log,interval({values.low},{values.high}))"
    return ",".join(str(value).replace(" ", "") for value in values)


def _curve(file: Path, *, best: bool) -> Curve:
    records = [json.loads(line) for line in file.read_text().splitlines()]
    records = [record for record in records if record["mode"] == "val"]
    losses = [float(record["loss"]) for record in records]
    return Curve(
        list(accumulate(losses, min)) if best else losses,
        [record["iteration"] for record in records],
        [record["timestamp"] for record in records],
    )


def _target(curves: list[Curve]) -> tuple[float, float]:
    """Return the target of a random search, and the iterations that it needs until then."""
    ends = np.array([one.losses[-1] if len(one.losses) == EPOCHS else math.nan for one in curves])
    orders = [np.random.default_rng(seed).permutation(len(curves)) for seed in range(ORDERS)]
    target = statistics.median_high(float(np.nanmin(ends[order[:TRIALS]])) for order in orders)
    lengths = np.array([one.iterations[-1] for one in curves])
    first = [int(np.argmax(ends[order] <= target)) for order in orders]
    return target, statistics.median(
        int(lengths[order[: at + 1]].sum()) for order, at in zip(orders, first, strict=True)
    )


def _spent(curves: list[Curve], target: float) -> float:
    """Return the iterations of all trials when the first complete one reaches the target; infinity if none does."""
    ends = [one.times[-1] for one in curves if len(one.losses) == EPOCHS and one.losses[-1] <= target]
    if not ends:
        return math.inf
    return sum(
        max((count for count, time in zip(one.iterations, one.times, strict=True) if time <= min(ends)), default=0)
        for one in curves
    )


if __name__ == "__main__":
    main()
