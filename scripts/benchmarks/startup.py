"""Duration of a start: `--help`, `--dry-run` and a run of one iteration, as ratios to imports within the same round.

    python scripts/benchmarks/startup.py [--rounds 7]

Goals: `--help` and `--dry-run`, which do not import torch, take at most 2.6 times as long as importing hydra. A run of
one iteration takes at most 1.6 times as long as importing torch. A warm `build` of the digits, in a process that has
built before, takes at most 50 ms. Python stores the bytecode of hydraloop as for its users, even if
PYTHONDONTWRITEBYTECODE is set.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parents[2]

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
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
MOST_MS = 50


def main() -> None:
    """Run the benchmark and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for round_ in range(rounds + 1):  # the first round warms the disk's cache and is not counted
        for name, command in COMMANDS.items():
            seconds = _run(command)
            if round_:
                times[name].append(seconds)
    print(f"{rounds} rounds, seconds")
    for name, values in times.items():
        print(f"  {name:<20} {_spread(values)}")
    print("ratios")
    for name, (base, most) in GOALS.items():
        ratios = [one / other for one, other in zip(times[name], times[base], strict=True)]
        met = "met" if statistics.median(ratios) <= most else "NOT met"
        print(f"  {f'{name} / {base}':<34} {_spread(ratios)}  goal: at most {most}, {met}")
    print("warm builds of the digits, ms")
    for overrides in ([], ["hooks=[ema]"]):
        builds = _warm_builds(overrides)
        met = "met" if statistics.median(builds) <= MOST_MS else "NOT met"
        print(f"  {' '.join(overrides) or 'the default config':<34} {_spread(builds)}  goal: at most {MOST_MS}, {met}")


def _warm_builds(overrides: list[str]) -> list[float]:
    command = [sys.executable, "-c", WARM_BUILDS, *overrides]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, check=True, stdout=subprocess.PIPE, text=True)
    return [float(line) for line in done.stdout.splitlines()[-20:]]


def _run(command: list[str]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        run_dir = [f"hydra.run.dir={folder}/run"] if command[0] == "train.py" else []
        start = perf_counter()
        subprocess.run(
            [sys.executable, *command, *run_dir], cwd=ROOT, env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL
        )
        return perf_counter() - start


def _spread(values: list[float]) -> str:
    return f"median {statistics.median(values):.2f}  (min {min(values):.2f}, max {max(values):.2f})"


if __name__ == "__main__":
    main()
