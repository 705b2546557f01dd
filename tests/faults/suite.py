"""Kills many runs at random moments and prints tables: `scripts/fault_suite.sh [runs] [seed]`."""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

from tests.e2e.projects import Run
from tests.faults import tables
from tests.faults.comparison import differences
from tests.faults.harness import ALL_HOOKS, KINDS, PHASES, TWO, VICTIMS, HungError, Kill, OrphanError, make, train

MOST_KILLS = 5
"""Of a run; each run has at least one planned."""
ENDS = ("equal", "different", "failed", "hung", "orphans")
"""How a run ends."""


def main(runs: int = 200, seed: int = 0) -> int:
    """Return the exit code: 0 if all runs are equal to those without a kill."""
    began, counts = time.monotonic(), defaultdict[str, Counter[str]](Counter)
    kills, seconds = Counter[tuple[str, str]](), 0.0
    with tempfile.TemporaryDirectory() as folder:
        project = make(Path(folder) / "project")
        whole: dict[tuple[str, tuple[str, ...]], Run] = {}
        for number, kind in enumerate(_kinds(runs, seed)):
            hooks = ALL_HOOKS if number % 3 == 2 else ()
            if (kind, hooks) not in whole:
                whole[kind, hooks] = train(project, f"whole_{len(whole)}", kind, [], hooks).run
            draws = random.Random(f"{seed} {number}")
            planned = [Kill.draw(draws, kind) for _ in range(draws.randint(1, MOST_KILLS))]
            try:
                outcome = train(project, f"killed_{number}", kind, planned, hooks)
            except AssertionError as error:
                end = {HungError: "hung", OrphanError: "orphans"}.get(type(error), "failed")
                found = [str(error)]
            else:
                found = differences(whole[kind, hooks], outcome.run)
                end = "different" if found else "equal"
                counts[kind]["kills"] += len(outcome.kills)
                kills.update((kill.phase, kill.victim) for kill in outcome.kills)
                seconds = max(seconds, outcome.seconds_of_orphans)
            counts[kind].update(["runs", end, *(["all hooks"] if hooks else [])])
            if found:
                print(
                    f"run {number} ({kind}{', all hooks' if hooks else ''}) {end}, {planned}:",
                    *found[:5],
                    sep="\n  ",
                    file=sys.stderr,
                    flush=True,
                )
    _print_runs(counts)
    print()
    _print_kills(kills)
    print()
    print(f"Seed {seed}. The processes of a killed run ended after {seconds:.1f} s or less.")
    print(f"{(time.monotonic() - began) / 60:.0f} minutes.")
    return int(sum(count["equal"] for count in counts.values()) < runs)


def _kinds(runs: int, seed: int) -> list[str]:
    """Return the kind of each run: seven in ten have one process, because two ranks take ten times as long."""
    each = [kind for kind, line in KINDS.items() for _ in range(3 if TWO in line else 7)]
    random.Random(seed).shuffle(each)
    return [each[number % len(each)] for number in range(runs)]


def _print_runs(counts: Mapping[str, Counter[str]]) -> None:
    """Print the table of all kinds of runs."""
    columns = ("runs", "all hooks", "kills", *ENDS)
    tables.head("ranks", "data", "strategy", "workers", "hooks", *columns)
    for kind in KINDS:
        if counts[kind]:
            tables.row(*_described(kind), *(counts[kind][name] for name in columns))
    tables.row("all", "", "", "", "", *(sum(count[name] for count in counts.values()) for name in columns))


def _described(kind: str) -> tuple[str, str, str, str, str]:
    """Return the ranks, the data, the strategy, the workers of each rank, and the hooks."""
    line = dict(setting.split("=", 1) for setting in KINDS[kind])
    ranks, strategy = line.get("distributed.nproc_per_node", "1"), line.get("distributed.strategy", "ddp")
    data = "iterable" if line.get("data.train._target_", "").endswith("Stream") else "map"
    hooks = line.get("hooks", "[ema]").strip("[]")
    ends = ", of one epoch" if line.get("data.loader.persistent_workers") == "false" else ""
    return ranks, data, strategy.upper() if ranks != "1" else "", line.get("data.loader.num_workers", "0") + ends, hooks


def _print_kills(kills: Mapping[tuple[str, str], int]) -> None:
    """Print the table of all kills: in which moment, and what was killed."""
    tables.head("killed in", "the run", "a worker", "rank 0", "rank 1", "the run after a save on a full disk")
    for phase in PHASES:
        tables.row(phase, *(kills.get((phase, victim), 0) for victim in VICTIMS))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
