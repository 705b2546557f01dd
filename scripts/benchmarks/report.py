"""Size and time of the report of a large sweep.

    python scripts/benchmarks/report.py [--jobs 500] [--points 1000] [--keep FOLDER]

Writes the files of a sweep that was never run, with the project's own writers: a search for two keys would have such
jobs. Each job has `--points` records of training and a tenth of that of validation. With 500 jobs of 1,000 points, the
page has at most 15 MB, and writing it takes at most 20 s.
"""

from __future__ import annotations

import argparse
import math
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import environment, goal, machine

from hydraloop.run_files.record_writer import as_json
from hydraloop.sweeps import states
from hydraloop.sweeps.axes import Axis
from hydraloop.sweeps.jobs import Jobs
from hydraloop.sweeps.states import JobState
from hydraloop.sweeps.sweep_description import Description
from hydraloop.sweeps.sweep_directory import SweepDirectory


def main() -> None:
    """Write a sweep, and measure its report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=500, help="a multiple of 20")
    parser.add_argument("--points", type=int, default=1000, help="records of training of each job")
    parser.add_argument("--keep", type=Path, help="folder in which the sweep and the page stay")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.keep or Path(folder, "sweep")
        write_sweep(path, args.jobs, args.points)
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "hydraloop", "report", path], env=environment(), check=True)
        seconds = time.perf_counter() - began
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        megabytes = (path / "report.html").stat().st_size / 1e6
    print(f"{args.jobs:,} jobs with {args.points:,} points each, {machine()}")
    goal("size of the page [MB]", [megabytes], most=15)
    goal("time [s]", [seconds], most=20)
    print(f"CPU time [s]: {used.ru_utime + used.ru_stime:.1f}")


def write_sweep(path: Path, jobs: int, points: int) -> None:
    """Write the files of a sweep over two keys, all of whose jobs have finished."""
    draw = random.Random(0)
    lrs = tuple((f"optimizer.lr={10 ** -(4 - 3 * n / (jobs // 20)):.4g}",) for n in range(jobs // 20))
    decays = tuple((f"optimizer.weight_decay={n / 20:g}",) for n in range(20))
    axes = [Axis(("optimizer.lr",), lrs), Axis(("optimizer.weight_decay",), decays)]
    listed = Jobs.of_axes(axes)
    typed = tuple(f"{axis.keys[0]}={','.join(value[0].partition('=')[2] for value in axis.values)}" for axis in axes)
    described = Description(
        "0", time.time(), ("python", "train.py", "-m"), typed, {"": {}}, "${hydra.job.num}", listed, "seed", {}
    )
    directory = SweepDirectory.create(path, described)
    for number in range(listed.count):
        folder = directory.folder(number)
        folder.mkdir()
        speed = draw.uniform(0.3, 3)
        lines = [line for n in range(1, points + 1) for line in records(n, n / points, speed, draw)]
        (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
        told = {"metric": "accuracy", "rule": "greater", "value": 1 - math.exp(-speed) / 2, "step": 10 * points}
        states.write(folder, JobState(number, "finished", directory=str(number), seconds=60.0, **told), flush=False)


def records(number: int, share: float, speed: float, draw: random.Random) -> list[str]:
    """Return the lines of a record of training, and every tenth time of one of validation."""
    loss = math.exp(-3 * speed * share) + draw.uniform(0, 0.05)
    place = {"epoch": 1 + number // 100, "iteration": 10 * number}
    speeds = {"eta": 100 * (1 - share), "time": draw.uniform(0.02, 0.03), "data_time": draw.uniform(0, 0.001)}
    train = {
        "mode": "train",
        **place,
        "lr": 0.01 * (1 - share),
        "momentum": 0.9,
        **speeds,
        "memory": 270.0,
        "loss": loss,
    }
    val = {"mode": "val", **place, "accuracy": 1 - math.exp(-speed * share) / 2, "loss": loss * 1.1}
    return [as_json(one) + "\n" for one in ([train] if number % 10 else [train, val])]


if __name__ == "__main__":
    main()
