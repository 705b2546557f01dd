"""Time of a sweep's job of two iterations above that of the same build and iterations in a warm process.

    python scripts/benchmarks/sweeps/jobs.py [--jobs 200] [--workers 2] [--rounds 3]

The sweep's time is from the start of its first job to the end of its last one. It is compared with the same runs in
one warm process, and with as many warm processes as the sweep has workers, which share the runs. Warm processes import
everything and train once before. Sweeps and warm processes alternate. Goal: at most 40 ms per job above as many warm
processes; one process has only one of the processors. Also prints how often git was called.
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
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
GOAL = 40.0
"""Milliseconds."""
LINE = ("engine.max_iters=2",)
WARM = """
import logging, os, sys, time
from pathlib import Path
import hydraloop
logging.disable(logging.INFO)
name, jobs, *line = sys.argv[1:]
def train(seed):
    cfg = hydraloop.compose([*line, f"seed={seed}"])
    began = time.perf_counter()
    hydraloop.build(cfg, run_dir=Path(name) / str(seed)).train()
    return time.perf_counter() - began
train(10**6)
Path(name, "ready").touch()
sys.stdin.readline()
print(sum(train(seed) for seed in range(int(jobs))))
"""
"""Trains and prints the seconds. Composing is not counted."""
GIT = """#!/bin/sh
echo "$*" >> "{log}"
exec {git} "$@"
"""


def main() -> None:
    """Run the benchmark and print the times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    times: dict[str, list[float]] = {"a job of the sweep": []}
    warm = {"a run in one warm process": 1, f"a run in {args.workers} warm processes": args.workers}
    starts, calls = [], []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            start, seconds, git = sweep(project(Path(folder)), args.jobs, args.workers)
            starts.append(start)
            calls.append(git)
            times["a job of the sweep"].append(1000 * seconds / args.jobs)
        for name, processes in warm.items():
            with tempfile.TemporaryDirectory() as folder:
                seconds = _warm(project(Path(folder)), args.jobs, processes)
            times.setdefault(name, []).append(1000 * seconds / args.jobs)
    print(f"{args.rounds} rounds, {args.jobs} jobs, {args.workers} at a time, milliseconds for each job")
    for name, values in times.items():
        print(f"  {name:<30} {spread(values)}")
    jobs, *others = times.values()
    for name, values in zip(warm, others, strict=True):
        above = [job - run for job, run in zip(jobs, values, strict=True)]
        goal = f"  goal: at most {GOAL:.0f}" if warm[name] == args.workers else ""
        print(f"  {'above ' + name[2:]:<30} {spread(above)}{goal}")
    print(f"seconds from the command to the first job: {spread(starts)}")
    print(f"calls of git in a sweep: {', '.join(map(str, calls))}")


def sweep(folder: Path, jobs: int, workers: int) -> tuple[float, float, int]:
    """Return the seconds until the first job, the seconds of all jobs, and the calls of git."""
    log = folder / "git.log"
    shim = folder / "bin" / "git"
    shim.parent.mkdir()
    shim.write_text(GIT.format(log=log, git=shutil.which("git")))
    shim.chmod(0o755)
    environment = {**environment_of(), "PATH": f"{shim.parent}{os.pathsep}{os.environ['PATH']}"}
    seeds = ",".join(map(str, range(jobs)))
    line = ["-m", f"seed={seeds}", f"sweep.max_workers={workers}", "hydra.sweep.dir=all", *LINE]
    began = time.time()  # the clock of the jobs' states
    done = subprocess.run(
        [sys.executable, "train.py", *line], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    states = [json.loads((folder / "all" / str(number) / "job.json").read_text()) for number in range(jobs)]
    first = min(state["began"] for state in states)
    return first - began, max(state["ended"] for state in states) - first, len(log.read_text().splitlines())


def _warm(folder: Path, jobs: int, workers: int) -> float:
    """Return the seconds in which warm processes train all runs."""
    share = [jobs // workers + (number < jobs % workers) for number in range(workers)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WARM, f"warm_{number}", str(count), *LINE],
            cwd=folder,
            env=environment_of(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for number, count in enumerate(share)
    ]
    while len(list(folder.glob("warm_*/ready"))) < workers:
        assert all(process.poll() is None for process in processes), "a warm process has failed"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    return max(float(process.communicate()[0].split()[-1]) for process in processes)


def project(folder: Path) -> Path:
    """Fill a folder with what a user has."""
    shutil.copytree(ROOT / "conf", folder / "conf")
    shutil.copytree(ROOT / "my_project", folder / "my_project")
    shutil.copy(ROOT / "train.py", folder)
    return folder


def environment_of() -> dict[str, str]:
    """Return the environment of all processes."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def spread(values: list[float]) -> str:
    """Return the median, the smallest and the largest value."""
    return f"{statistics.median(values):6.1f} (from {min(values):.1f} to {max(values):.1f})"


if __name__ == "__main__":
    main()
