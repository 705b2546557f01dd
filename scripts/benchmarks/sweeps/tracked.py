"""Duration of a sweep with a tracker, as a ratio to the same sweep without it.

    python scripts/benchmarks/sweeps/tracked.py [--rounds 3] [--jobs 10] [--iterations 40] [--tracker mlflow]

Goal: ten jobs of 1 s with MLflow take at most 1.3 times as long as without. Sweeps with and without the tracker
alternate. Each has its own folder, so MLflow creates a new database. The time is that of the whole command; it includes
the wait for followers at the end. The output says how many records have arrived by then.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parents[3]
GOAL = 1.3


def main() -> None:
    """Run the benchmark and print the times, their ratio, and what has arrived."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=10)
    parser.add_argument("--iterations", type=int, default=40, help="of each job")
    parser.add_argument("--tracker", default="mlflow")
    args = parser.parse_args()
    times: dict[str, list[float]] = {"without": [], f"with {args.tracker}": []}
    arrived = []
    for _ in range(args.rounds):
        for name, tracker in zip(times, ("", args.tracker), strict=True):
            with tempfile.TemporaryDirectory() as folder:
                times[name].append(_sweep(Path(folder), tracker, args.jobs, args.iterations))
                if tracker:
                    arrived.append(_arrived(Path(folder)))
    print(f"{args.rounds} rounds, {args.jobs} jobs, seconds")
    for name, values in times.items():
        print(f"  {name:<20} {_spread(values)}")
    ratios = [other / one for one, other in zip(*times.values(), strict=True)]
    met = "met" if statistics.median(ratios) <= GOAL else "NOT met"
    print(f"  {'ratio':<20} {_spread(ratios)}  goal: at most {GOAL}, {met}")
    print(f"  complete runs        {', '.join(map(str, arrived))} of {args.jobs}")


def _sweep(folder: Path, tracker: str, jobs: int, iterations: int) -> float:
    shutil.copytree(ROOT / "conf", folder / "conf")
    shutil.copy(ROOT / "train.py", folder)
    rates = ",".join(f"{number + 1}e-4" for number in range(jobs))
    line = ["-m", f"hooks=[{tracker}]", f"optimizer.lr={rates}", f"engine.max_iters={iterations}", "engine.test=false"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    start = perf_counter()
    subprocess.run(
        [sys.executable, "train.py", *line],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return perf_counter() - start


def _arrived(folder: Path) -> int:
    cursors = folder.glob("multirun/*/*/*/tracking/*.cursor.json")
    return sum(json.loads(path.read_text(encoding="utf-8"))["complete"] for path in cursors)


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):6.2f} (from {min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
