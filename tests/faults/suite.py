"""Kills many runs at random moments and prints a table: `scripts/fault_suite.sh [runs] [seed]`."""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.e2e.projects import Run
from tests.faults.harness import KINDS, PHASES, TWO, VICTIMS, Kill, differences, make, train

MOST_KILLS = 5
"""Of a run; each run has at least one planned."""


def main(runs: int = 200, seed: int = 0) -> int:
    """Return the exit code: 0 if all runs are equal to those without a kill."""
    began, counts, kinds = time.monotonic(), defaultdict[str, Counter[str]](Counter), _kinds(runs, seed)
    phases, seconds, failures = Counter[str](), 0.0, 0
    with tempfile.TemporaryDirectory() as folder:
        project = make(Path(folder) / "project")
        whole: dict[str, Run] = {}
        for number, kind in enumerate(kinds):
            if kind not in whole:
                whole[kind] = train(project, f"whole_{len(whole)}", kind, []).run
            draws = random.Random(f"{seed} {number}")
            kills = [Kill.draw(draws, VICTIMS) for _ in range(draws.randint(1, MOST_KILLS))]
            counts[kind]["runs"] += 1
            try:
                outcome = train(project, f"killed_{number}", kind, kills)
            except (AssertionError, subprocess.TimeoutExpired) as error:
                found = [str(error), str(getattr(error, "output", None) or "")]
            else:
                found = differences(whole[kind], outcome.run)
                counts[kind]["kills"] += outcome.kills
                phases.update(kill.phase for kill in kills[: outcome.kills])
                seconds = max(seconds, outcome.seconds_of_orphans)
            counts[kind]["equal"] += not found
            if found:
                failures += 1
                print(f"run {number} ({kind}), {kills}:", *found[:5], sep="\n  ", file=sys.stderr, flush=True)
    rows = {kind: [counts[kind][name] for name in ("runs", "kills", "equal")] for kind in KINDS if counts[kind]}
    rows["all"] = [sum(column) for column in zip(*rows.values(), strict=True)]
    print(*_table("run", ("runs", "kills", "equal"), rows), "", sep="\n")
    print(*_table("killed in", ("kills",), {phase: [phases[phase]] for phase in PHASES}), "", sep="\n")
    print(f"Seed {seed}. The processes of a killed run ended after {seconds:.1f} s or less.")
    print(f"{(time.monotonic() - began) / 60:.0f} minutes.")
    return int(failures > 0)


def _kinds(runs: int, seed: int) -> list[str]:
    """Return the kind of each run: seven in ten have one process, because two ranks take ten times as long."""
    each = [kind for kind, line in KINDS.items() for _ in range(3 if TWO in line else 7)]
    random.Random(seed).shuffle(each)
    return [each[number % len(each)] for number in range(runs)]


def _table(first: str, names: tuple[str, ...], rows: Mapping[str, list[int]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    yield f"| {first} | {' | '.join(names)} |"
    yield f"|---|{'---|' * len(names)}"
    for name, numbers in rows.items():
        yield f"| {name} | {' | '.join(map(str, numbers))} |"


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
