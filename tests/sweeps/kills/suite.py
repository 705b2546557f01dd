"""Kills the processes of many sweeps and prints a table: `scripts/sweep_suite.sh [sweeps] [seed]`."""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.sweeps.kills.harness import AXES, VICTIMS, Kill, make, train
from tests.sweeps.kills.judge import problems

KILLS = 20
"""Planned for each sweep. Some sweeps end before the last of them."""
JOBS = 12
"""Of each sweep."""
WRONG = ("lost", "doubled", "different", "failed")


def main(sweeps: int = 20, seed: int = 0) -> int:
    """Return the exit code: 0 if nothing is wrong."""
    began, kills, wrong = time.monotonic(), Counter[str](), Counter[str]()
    torn, ended = 0, 0
    with tempfile.TemporaryDirectory() as folder:
        project = make(Path(folder) / "project")
        whole = train(project, "whole", AXES, random.Random(seed), [])
        for number in range(sweeps):
            draws = random.Random(f"{seed} {number}")
            try:
                sweep = train(project, f"sweep_{number}", AXES, draws, [Kill.draw(draws) for _ in range(KILLS)])
                found = list(problems(sweep, whole))
            except AssertionError as error:
                found = [("failed", str(error))]
            else:
                kills.update(kill.victim for kill in sweep.kills)
                torn += sum(kill.torn is not None for kill in sweep.kills)
                ended += JOBS - len({text.partition(":")[0] for _, text in found})
            wrong.update(kind for kind, _ in found)
            for kind, text in found:
                print(f"sweep {number}: {kind}: {text}", file=sys.stderr, flush=True)
    row = [sweeps, *(kills[victim] for victim in VICTIMS), sum(kills.values()), torn, sweeps * JOBS, ended]
    names = ["sweeps", *(f"killed: {victim}" for victim in VICTIMS), "kills", "torn files", "jobs", "ended once"]
    print(f"| {' | '.join([*names, *WRONG])} |", f"|{'---|' * (len(names) + len(WRONG))}", sep="\n")
    print(f"| {' | '.join(map(str, [*row, *(wrong[kind] for kind in WRONG)]))} |")
    print(f"\nSeed {seed}. {(time.monotonic() - began) / 60:.0f} minutes.")
    return int(wrong.total() > 0 or ended < sweeps * JOBS)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
