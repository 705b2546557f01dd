"""Kills the processes of many sweeps and prints a table: `scripts/sweep_suite.sh [sweeps] [seed]`."""

from __future__ import annotations

import multiprocessing
import random
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from tests.faults import tables
from tests.faults.sweeps.harness import VICTIMS, Kill, Sweep, make, train
from tests.faults.sweeps.judge import problems, problems_of_search

MOST, MOST_OF_A_SEARCH = 40, 20
"""Kills of a sweep. Most grids end before."""
LR = "optimizer.lr=tag(log,interval(1e-4,1e-1))"
MANY, FEW = ("seed=0,1,2,3,4,5,6", "optimizer.lr=1e-2,3e-2"), ("seed=0,1,2", "optimizer.lr=1e-2,3e-2")
SEARCH = "a search, `sweep.promote=asha`"
TRIALS = 60
KINDS = {
    "forks": MANY,
    "forks, `hydra.sweep.subdir`": (*MANY, "hydra.sweep.subdir='lr-${optimizer.lr}/${seed}'"),
    "new processes": (*FEW, "+hydra.job.env_set={OF_THE_SWEEP: 1}"),
    "forks with two ranks": (*FEW, "distributed.nproc_per_node=2"),
    "submitit, local": (*FEW, "sweep.executor=submitit", "sweep.submitit={cluster: local, timeout_min: 60}"),
    SEARCH: (LR, f"sweep.trials={TRIALS}", "sweep.promote=asha", "engine.val_interval=6"),
}
"""What the jobs are, and axes and options."""
WRONG = ("lost", "doubled", "different", "failed")
COLUMNS = ("sweeps", *VICTIMS, "kills", "torn files", "jobs", "ended once", *WRONG)


def main(sweeps: int = 20, seed: int = 0) -> int:
    """Return the exit code: 0 if nothing is wrong."""
    began, names = time.monotonic(), [*KINDS]
    counts = Counter(names[max(0, number % 10 - 5)] for number in range(sweeps))
    counts[SEARCH] = -(-sweeps // 20)
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as processes:
        rows = dict(
            zip(counts, processes.map(partial(_of_a_kind, seed), *zip(*counts.items(), strict=True)), strict=True)
        )
    total = sum(rows.values(), Counter[str]())
    tables.head("jobs are", *COLUMNS)
    for name, row in {**rows, "all": total}.items():
        tables.row(name, *(row[column] for column in COLUMNS))
    print(f"\nSeed {seed}. {(time.monotonic() - began) / 60:.0f} minutes.")
    return int(any(total[kind] for kind in WRONG) or total["ended once"] < total["jobs"])


def _of_a_kind(seed: int, name: str, sweeps: int) -> Counter[str]:
    """Return a row of the table."""
    row = Counter(sweeps=sweeps)
    with tempfile.TemporaryDirectory() as folder:
        project = make(Path(folder) / "project")
        whole = None if name == SEARCH else train(project, "whole", KINDS[name], random.Random(seed), [])
        for number in range(sweeps):
            draws = random.Random(f"{seed} {name} {number}")
            kills = [Kill.draw(draws) for _ in range(MOST if whole else MOST_OF_A_SEARCH)]
            row["jobs"] += len(_jobs(whole)) if whole else TRIALS
            try:
                sweep = train(project, f"sweep_{number}", KINDS[name], draws, kills)
                found = list(problems(sweep, whole) if whole else problems_of_search(sweep))
            except AssertionError as error:
                found = [("failed", str(error))]
            else:
                row.update(kill.victim for kill in sweep.kills)
                row["kills"] += len(sweep.kills)
                row["torn files"] += sum(kill.torn is not None for kill in sweep.kills)
                row["ended once"] += len(_jobs(sweep)) - len({text.partition(":")[0] for _, text in found})
            row.update(kind for kind, _ in found)
            for kind, text in found:
                print(f"{name}, sweep {number}: {kind}: {text}", file=sys.stderr, flush=True)
    return row


def _jobs(sweep: Sweep) -> set[int]:
    return {job for job, _, _ in sweep.events()}


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
