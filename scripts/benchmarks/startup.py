"""What a start costs: `--help` and `--dry-run` as whole processes, and from `import torch` to the first iteration.

    python scripts/benchmarks/startup.py [--rounds 7]

Goals: both commands under 0.5 s; at most 0.6 s from the end of `import torch` to the first iteration of a default run.
An interpreter that does nothing is timed beside them, since it is part of both.
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

FIRST_ITERATION = """
import sys, time
import torch
start = time.perf_counter()
import hydraloop
from pathlib import Path
from hydraloop.engine.engine import Engine

class Reached(BaseException):
    pass

def first(self, *_):
    print("seconds", time.perf_counter() - start)
    raise Reached

Engine.train_iter = first
sys.argv = ["train.py", "hooks=ema"]
try:
    hydraloop.main(folder=Path(ROOT_FOLDER))
except Reached:
    pass
"""


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    commands = {
        "python -c pass": ["-c", "pass"],
        "train.py --help": ["train.py", "--help"],
        "train.py --dry-run": ["train.py", "--dry-run", "hooks=ema,profiler"],
    }
    times: dict[str, list[float]] = {name: [] for name in (*commands, "import torch to the first iteration")}
    for round_ in range(rounds + 1):  # the first round warms the disk's cache and is not counted
        for name, command in commands.items():
            start = perf_counter()
            subprocess.run([sys.executable, *command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            if round_:
                times[name].append(perf_counter() - start)
        if round_:
            times["import torch to the first iteration"].append(_first_iteration())
    goals = {"train.py --help": 0.5, "train.py --dry-run": 0.5, "import torch to the first iteration": 0.6}
    print(f"{rounds} rounds, seconds")
    for name, values in times.items():
        middle = statistics.median(values)
        goal = goals.get(name)
        verdict = "" if goal is None else f"  goal: at most {goal}, {'met' if middle <= goal else 'NOT met'}"
        print(f"  {name:<36} median {middle:.2f}  (min {min(values):.2f}, max {max(values):.2f}){verdict}")


def _first_iteration() -> float:
    code = FIRST_ITERATION.replace("ROOT_FOLDER", repr(str(ROOT)))
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            check=False,
            capture_output=True,
            text=True,
        )
    line = next(line for line in done.stdout.splitlines() if line.startswith("seconds "))
    return float(line.split()[1])


if __name__ == "__main__":
    main()
