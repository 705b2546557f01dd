"""Duration of a start: `--help`, `--dry-run` and a run of one iteration, as ratios to imports within the same round.

    python scripts/benchmarks/startup.py [--rounds 7]

Goals: `--help` and `--dry-run`, which do not import torch, take at most 2.6 times as long as importing hydra. A run of
one iteration takes at most 1.6 times as long as importing torch. A warm `build` of the digits, in a process that has
built before, takes at most 50 ms.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from functools import partial
from time import perf_counter

from measure import ROOT, environment, goal, interleaved, parser, ratios, row, spread, table

COMMANDS = {
    "import hydra": ["-c", "import hydra"],
    "train.py --help": ["train.py", "--help"],
    "train.py --dry-run": ["train.py", "--dry-run", "hooks=[ema,profiler]"],
    "import torch": ["-c", "import torch"],
    "one iteration": ["train.py", "engine.max_iters=1"],
}
GOALS = {
    "train.py --help": ("import hydra", 2.6),
    "train.py --dry-run": ("import hydra", 2.6),
    "one iteration": ("import torch", 1.6),
}
"""By command: the command that it is compared with, and the largest ratio that meets the goal."""
WARM_BUILDS = """
import sys, tempfile, time
from pathlib import Path
import hydraloop

with tempfile.TemporaryDirectory() as folder:
    for number in range(23):
        cfg = hydraloop.compose(sys.argv[1:], folder=".")
        start = time.perf_counter()
        hydraloop.build(cfg, run_dir=Path(folder, str(number)), folder=".")
        if number >= 3:
            print(1000 * (time.perf_counter() - start))
"""
"""Prints the milliseconds of 20 builds; the arguments are overrides."""


def main() -> None:
    """Run the benchmark and print the table."""
    rounds = parser(__doc__, rounds=7).parse_args().rounds
    times = interleaved({name: partial(seconds, command) for name, command in COMMANDS.items()}, rounds)
    table(f"{rounds} rounds", "s")
    for name, values in times.items():
        row(name, spread(values))
    print()
    for name, (base, most) in GOALS.items():
        goal(f"{name} / {base}", ratios(times[name], times[base]), most=most)
    for overrides in ([], ["hooks=[ema]"]):
        command = [sys.executable, "-c", WARM_BUILDS, *overrides]
        printed = subprocess.run(command, cwd=ROOT, env=environment(), check=True, stdout=subprocess.PIPE, text=True)
        builds = [float(line) for line in printed.stdout.splitlines()[-20:]]
        goal(f"warm build of {' '.join(overrides) or 'the default config'}, ms", builds, most=50, digits=1)


def seconds(command: list[str]) -> float:
    """Return the time of a command."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = [f"hydra.run.dir={folder}/run"] if command[0] == "train.py" else []
        start = perf_counter()
        line = [sys.executable, *command, *run_dir]
        subprocess.run(line, cwd=ROOT, env=environment(), check=True, stdout=subprocess.DEVNULL)
        return perf_counter() - start


if __name__ == "__main__":
    main()
