"""Kills the processes of sweeps and prints a table: `scripts/sweep_suite.sh [kills] [seed]`."""

from __future__ import annotations

import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from tests.faults import tables
from tests.faults.sweeps.harness import Sweep, make
from tests.faults.sweeps.judge import problems

LR = "optimizer.lr=tag(log,interval(1e-4,1e-1))"
_SEARCH = (LR, "sweep.trials=14")
_ONE = ("sweep.max_workers=1", "sweep.max_retries=9")
"""With one slot, and if killed jobs continue before the next one, a search suggests the same."""
KINDS = {
    "a grid": ("seed=0,1,2,3,4,5,6", "optimizer.lr=1e-2,3e-2", "sweep.max_workers=2"),
    "random search": (*_SEARCH, "sweep.sampler=random", "sweep.max_workers=2"),
    "TPE": (*_SEARCH, *_ONE),
    "NSGA-II": (*_SEARCH, *_ONE, "sweep.sampler={_target_: my_project.kills.nsga2}"),
    "TPE and ASHA": (*_SEARCH, *_ONE, "sweep.promote=asha"),
}
"""Axes and options."""
_FEWER = ("engine.max_iters=240", "engine.val_interval=60", "default_hooks.checkpoint.interval=30")
FEW = {
    "a grid": ("seed=0,1,2", "optimizer.lr=1e-2,3e-2", "sweep.max_workers=4", *_FEWER),
    "random search": (LR, "sweep.trials=6", "sweep.sampler=random", "sweep.max_workers=4", *_FEWER),
    "TPE and ASHA": (LR, "sweep.trials=6", "sweep.promote=asha", *_ONE, *_FEWER),
}
"""The same where a job starts in seconds."""
WRONG = ("lost", "doubled", "different", "left", "failed")


def main(
    count: int = 60, seed: int = 0, kind: type[Sweep] = Sweep, kinds: Mapping[str, tuple[str, ...]] = KINDS
) -> int:
    """Run sweeps with so many kills. Return the exit code: 0 if nothing is wrong.

    Args:
        kind: where the jobs run.
        kinds: what they are of.
    """
    began, rows = time.monotonic(), list[Counter[str]]()
    columns = ("sweeps", *kind.VICTIMS, *kind.PHASES, "refused", "synced", "jobs", *WRONG)
    tables.head("jobs are of", *columns)
    for place, (name, line) in enumerate(kinds.items()):
        own = count * (place + 1) // len(kinds) - count * place // len(kinds)
        rows.append(_of_a_kind(kind, name, line, random.Random(f"{seed} {name}"), own))
        tables.row(name, *(rows[-1][column] for column in columns))
    total = sum(rows, Counter[str]())
    tables.row("all", *(total[column] for column in columns))
    kills = sum(total[victim] for victim in kind.VICTIMS)
    print(f"\n{kills} kills. Seed {seed}. {(time.monotonic() - began) / 60:.0f} minutes.")
    return int(any(total[wrong] for wrong in WRONG) or kills < count or not total["refused"])


def _of_a_kind(kind: type[Sweep], name: str, line: tuple[str, ...], draws: random.Random, count: int) -> Counter[str]:
    """Return a row of the table."""
    row, kills = Counter[str](), kind.kills(draws, count)
    with tempfile.TemporaryDirectory() as folder:
        project = make(Path(folder) / "project")
        quiet = Sweep(project, "quiet", line)
        quiet.train(kind.kills(draws, 0), together=2)
        row["refused"] += quiet.refused
        while kills and not row["failed"]:
            sweep = kind(project, f"killed_{row['sweeps']}", line, draws)
            try:
                sweep.train(kills)
                found = list(problems(sweep, quiet))
            except AssertionError as error:
                found = [("failed", str(error))]
            row.update(["sweeps", *(problem for problem, _ in found)])
            row.update(sweep.killed)
            row.update(refused=sweep.refused, synced=sweep.synced, jobs=len({job for job, _, _ in sweep.events()}))
            for problem, text in found:
                print(f"{name}, {sweep.name}: {problem}: {text}", file=sys.stderr, flush=True)
            if found:
                print(sweep.printed, file=sys.stderr, flush=True)
    return row


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    sys.exit(main(*(int(word) for word in sys.argv[1:3])))
