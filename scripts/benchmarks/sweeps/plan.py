"""A sweep of 10,000 jobs: time until the first one, time and memory of planning, processor time while it waits.

    python scripts/benchmarks/sweeps/plan.py [--values 100] [--seconds 30]

Goals: the sweep is planned (`sweep.json` is written) within 40 s. Then the fork server starts. When it is ready, the
first job starts within 1 s: the time from plan to job is compared with that of a sweep of two jobs. The
controller has at most 500 MB, and uses less than 1 % of a core while jobs run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from jobs import environment_of, project  # of this folder

LINE = ("-m", "hydra.sweep.dir=all", "engine.max_epochs=1000000", "engine.test=false")


def main() -> None:
    """Run the benchmark and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--values", type=int, default=100, help="of each of the two axes")
    parser.add_argument("--seconds", type=float, default=30.0, help="of waiting")
    args = parser.parse_args()
    plan_of_few, few, _, _ = _measure(2, 1, 0.0)
    planned, first, memory, waiting = _measure(args.values, args.values, args.seconds)
    print(f"{args.values**2:,} jobs")
    for name, value, unit, goal in (
        ("sweep.json written after", planned, "s", 40.0),
        ("first job later than of 2 jobs by", first - few, "s", 1.0),
        ("memory of the controller", memory / 1e6, "MB", 500.0),
        ("processor time while it waits", 100 * waiting, "%", 1.0),
    ):
        print(f"  {name:<36} {value:8.2f} {unit}  goal: {goal:.0f}, {'met' if value <= goal else 'NOT met'}")
    print(f"  a sweep of 2 jobs: planned after {plan_of_few:.2f} s, its first job {few:.2f} s later")


def _measure(seeds: int, rates: int, seconds: float) -> tuple[float, float, float, float]:
    """Return the seconds to the plan and from there to a job, the most bytes, and the share of a core while waiting."""
    axes = [f"seed={','.join(map(str, range(seeds)))}", f"optimizer.lr={','.join(f'{n + 1}e-5' for n in range(rates))}"]
    with tempfile.TemporaryDirectory() as folder:
        path = project(Path(folder)) / "all"
        began = time.time()
        process = psutil.Popen(
            [sys.executable, "train.py", *LINE, *axes],
            cwd=folder,
            env=environment_of(),
            stdout=subprocess.DEVNULL,
        )
        try:
            _until(process, path / "sweep.json")
            planned = time.time() - began
            state = path / "0" / "job.json"
            _until(process, state)
            first = json.loads(state.read_text())["began"] - began - planned
            time.sleep(min(seconds, 3.0))
            before, at = sum(process.cpu_times()[:2]), time.monotonic()
            time.sleep(seconds)
            used = (sum(process.cpu_times()[:2]) - before) / max(time.monotonic() - at, 1e-9)
            status = Path(f"/proc/{process.pid}/status").read_text()
            most = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
        finally:
            process.terminate()
            process.wait()
    return planned, first, most, used if seconds else 0.0


def _until(process: psutil.Popen, path: Path) -> None:
    while not path.exists():
        assert process.poll() is None, "the sweep has ended"
        time.sleep(0.005)


if __name__ == "__main__":
    main()
