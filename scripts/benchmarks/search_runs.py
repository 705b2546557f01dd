"""Real searches that confirm the recorded curves: random search and ASHA, until a trial reaches the target.

    python scripts/benchmarks/search_runs.py [digits char_lm mlp] [--rounds 3] [--best]

The searches of a round have the same seed, and so the same first configurations. The target is that of
`search_tables.py`; a trial that ends reaches it with its last validation loss, or with its best one (`--best`). Counted
are the iterations that all trials have validated by then, as on the tables.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from itertools import accumulate
from pathlib import Path

from measure import goal, interleaved, project, row, spread, table
from search_space import EPOCHS, SPACES, Log, Table
from search_tables import OVERRIDES, USUAL, target_of
from sweeps import sweep

SIDES = {"random search": (), "ASHA that continues": ("sweep.promote=asha",)}
MOST = 64
"""Complete trials of a random search, as on the tables. A search that does not reach the target is infinite."""


def main() -> None:
    """Print a table for each task."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tasks", nargs="*", default=[*SPACES], help="default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--best", action="store_true", help="the value of a trial is its best loss, not its last one")
    options = parser.parse_args()
    for task in options.tasks:
        compare(task, options.rounds, best=options.best)


def compare(task: str, rounds: int, *, best: bool) -> None:
    """Print how many iterations the searches need."""
    target = target_of(Table(task, best=best), 200)
    seeds = {name: iter(range(1, rounds + 1)) for name in SIDES}
    sides = {name: lambda name=name: reach(task, name, next(seeds[name]), target, best=best) for name in SIDES}
    found = interleaved(sides, rounds, warm_up=0)
    print(f"\nuntil a {'best' if best else 'last'} loss of {target:.5g}\n")
    table(f"{task}, {rounds} rounds", "iterations")
    for name, values in found.items():
        row(name, spread(values, 0))
    random, asha = (statistics.median(values) for values in found.values())
    goal("its iterations to those of random search", [asha / random], most=0.33)


def reach(task: str, name: str, seed: int, target: float, *, best: bool) -> float:
    """Return the iterations that a real search needs until the target; infinity if it does not reach it."""
    space = [f"{key}={_values(values)}" for key, values in SPACES[task].items()]
    line = [*OVERRIDES[task], *USUAL, *SIDES[name], *space, f"seed={seed}", "sweep.objectives={loss: min}"]
    line += ["sweep.sampler=random", "sweep.max_workers=4", f"sweep.until=best <= {target:.17g}"]
    line += [f"sweep.trials={MOST if name == 'random search' else 4 * MOST}"]
    if best:
        line.append("default_hooks.checkpoint.save_best=loss")
    with tempfile.TemporaryDirectory() as folder:
        sweep(project(Path(folder)), *line)
        return _iterations(Path(folder, "all"), target, best=best)


def _values(values: Log | list[object]) -> str:
    if isinstance(values, Log):
        return f"tag(log,interval({values.low},{values.high}))"
    return ",".join(str(value).replace(" ", "") for value in values)


def _iterations(sweep_dir: Path, target: float, *, best: bool) -> float:
    """Return the iterations of all trials when the first complete one has reached the target."""
    curves = [
        [json.loads(line) for line in file.read_text().splitlines() if '"mode": "val"' in line]
        for file in sweep_dir.glob("*/metrics.jsonl")
    ]
    ends = []
    for records in curves:
        losses = [float(record["loss"]) for record in records]
        reached = list(accumulate(losses, min)) if best else losses
        if len(records) == EPOCHS and reached[-1] <= target:
            ends.append(records[-1]["timestamp"])
    if not ends:
        return math.inf
    return sum(
        max((one["iteration"] for one in records if one["timestamp"] <= min(ends)), default=0) for records in curves
    )


if __name__ == "__main__":
    main()
