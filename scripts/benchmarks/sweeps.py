"""Cost of a sweep: its plan, its jobs, and a tracker.

    python scripts/benchmarks/sweeps.py plan    [--values 100] [--seconds 30]
    python scripts/benchmarks/sweeps.py jobs    [--jobs 200] [--workers 2] [--rounds 3]
    python scripts/benchmarks/sweeps.py tracked [--jobs 10] [--iterations 40] [--rounds 3] [--tracker mlflow]

* plan: a sweep of 10,000 jobs is planned (`sweep.json` is written) within 40 s. Its first job starts at most 1 s later
  than that of a sweep of two jobs, from the plan on. The controller has at most 500 MB, and uses less than 1 % of a
  core while jobs run.
* jobs: a job of two iterations takes at most 40 ms longer than the same run in as many warm processes as the sweep has
  workers. Warm processes import everything and train once before. The time of a sweep is from the start of its first
  job to the end of its last one. Also prints how often git was called.
* tracked: the same sweep with and without a tracker, each in its own folder. The time is that of the whole command.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from measure import differences, environment, goal, interleaved, project, ratios, row, spread, table

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
SHORT = "engine.max_iters=2"


def main() -> None:
    """Run one of the benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("question", choices=("plan", "jobs", "tracked"))
    parser.add_argument("--values", type=int, default=100, help="values of each of the two axes")
    parser.add_argument("--seconds", type=float, default=30.0, help="seconds in which the controller is watched")
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=40, help="iterations of a job with a tracker")
    parser.add_argument("--tracker", default="mlflow")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.question == "plan":
        plan(options.values, options.seconds)
    elif options.question == "jobs":
        jobs(options.jobs or 200, options.workers, options.rounds)
    else:
        tracked(options.tracker, options.jobs or 10, options.iterations, options.rounds)


def in_project(act: Callable[[Path], float]) -> float:
    """Return the figure of a function that gets a new project."""
    with tempfile.TemporaryDirectory() as folder:
        return act(project(Path(folder)))


def sweep(folder: Path, *line: str, **added: str) -> None:
    """`python train.py -m …` in a folder."""
    command = [sys.executable, "train.py", "-m", "hydra.sweep.dir=all", *line]
    done = subprocess.run(command, cwd=folder, env=environment(**added), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def plan(values: int, seconds: float) -> None:
    """Plan a sweep of two jobs and one of many jobs, and print the figures of the latter."""
    _, few, _, _ = _planned(2, 1, 0.0)
    planned, first, memory, waiting = _planned(values, values, seconds)
    print(f"{values**2:,} jobs")
    goal("sweep.json written after, s", [planned], most=40)
    goal("first job later than of 2 jobs by, s", [first - few], most=1)
    goal("memory of the controller, MB", [memory / 1e6], most=500)
    goal("processor time while jobs run, %", [100 * waiting], most=1)


def _planned(seeds: int, rates: int, seconds: float) -> tuple[float, float, float, float]:
    """Return the seconds to the plan and from there to a job, the most bytes, and the share of a core then."""
    axes = [f"seed={','.join(map(str, range(seeds)))}", f"optimizer.lr={','.join(f'{n + 1}e-5' for n in range(rates))}"]
    line = ("-m", "hydra.sweep.dir=all", "engine.max_epochs=1000000", "engine.test=false", *axes)
    with tempfile.TemporaryDirectory() as folder:
        path = project(Path(folder)) / "all"
        began = time.time()
        command = [sys.executable, "train.py", *line]
        process = psutil.Popen(command, cwd=folder, env=environment(), stdout=subprocess.DEVNULL)
        try:
            until(process, path / "sweep.json")
            planned = time.time() - began
            until(process, path / "0" / "job.json")
            first = json.loads((path / "0" / "job.json").read_text())["began"] - began - planned
            time.sleep(min(seconds, 3.0))
            before = sum(process.cpu_times()[:2])
            time.sleep(seconds)
            used = (sum(process.cpu_times()[:2]) - before) / seconds if seconds else 0.0
            most = most_memory(process)
        finally:
            process.terminate()
            process.wait()
    return planned, first, most, used


def most_memory(process: psutil.Popen) -> int:
    """Return the most bytes that a process has had."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def until(process: psutil.Popen, path: Path) -> None:
    """Wait until a process has written a file."""
    while not path.exists():
        assert process.poll() is None, "the sweep has ended"
        time.sleep(0.005)


def jobs(number: int, workers: int, rounds: int) -> None:
    """Compare a sweep's jobs with runs in warm processes."""
    calls_of_git: list[int] = []
    sides = {
        "a job of the sweep": lambda folder: _short_jobs(folder, number, workers, calls_of_git),
        "a run in one warm process": lambda folder: _warm(folder, number, 1),
        f"a run in {workers} warm processes": lambda folder: _warm(folder, number, workers),
    }
    times = interleaved({name: lambda act=act: in_project(act) for name, act in sides.items()}, rounds, warm_up=0)
    table(f"{rounds} rounds, {number} jobs, {workers} at a time", "ms for each job")
    for name, values in times.items():
        row(name, spread(values, 1))
    ours, one, several = times.values()
    row("above one warm process", spread(differences(ours, one), 1))
    goal(f"\nabove {workers} warm processes, ms", differences(ours, several), most=40, digits=1)
    print(f"calls of git in a sweep: {', '.join(map(str, calls_of_git))}")


def _short_jobs(folder: Path, number: int, workers: int, calls_of_git: list[int]) -> float:
    """Return the milliseconds of a job, and count the calls of git."""
    log, shim = folder / "git.log", folder / "bin" / "git"
    shim.parent.mkdir()
    shim.write_text(GIT.format(log=log, git=shutil.which("git")))
    shim.chmod(0o755)
    seeds = f"seed={','.join(map(str, range(number)))}"
    path = f"{shim.parent}{os.pathsep}{os.environ['PATH']}"
    sweep(folder, seeds, f"sweep.max_workers={workers}", SHORT, PATH=path)
    calls_of_git.append(len(log.read_text().splitlines()))
    states = [json.loads(file.read_text()) for file in folder.glob("all/*/job.json")]
    seconds = max(state["ended"] for state in states) - min(state["began"] for state in states)
    return float(1000 * seconds / number)


def _warm(folder: Path, number: int, workers: int) -> float:
    """Return the milliseconds of a run in warm processes that share the runs."""
    processes = []
    for worker in range(workers):
        share = number // workers + (worker < number % workers)
        command = [sys.executable, "-c", WARM, f"warm_{worker}", str(share), SHORT]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        processes.append(psutil.Popen(command, cwd=folder, env=environment(), text=True, **pipes))
    for worker, process in enumerate(processes):
        until(process, folder / f"warm_{worker}" / "ready")
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    return 1000 * max(float(process.communicate()[0].split()[-1]) for process in processes) / number


def tracked(tracker: str, number: int, iterations: int, rounds: int) -> None:
    """Compare a sweep with a tracker to the same one without."""
    rates = ",".join(f"{job + 1}e-4" for job in range(number))
    line = (f"optimizer.lr={rates}", f"engine.max_iters={iterations}", "engine.test=false")
    arrived: list[int] = []

    def seconds(hooks: str, folder: Path) -> float:
        start = time.perf_counter()
        sweep(folder, *line, f"hooks=[{hooks}]")
        took = time.perf_counter() - start
        if hooks:
            cursors = folder.glob("all/**/tracking/*.cursor.json")
            arrived.append(sum(json.loads(path.read_text(encoding="utf-8"))["complete"] for path in cursors))
        return took

    sides = {"without": "", f"with {tracker}": tracker}
    times = interleaved(
        {name: lambda hooks=hooks: in_project(lambda folder: seconds(hooks, folder)) for name, hooks in sides.items()},
        rounds,
        warm_up=0,
    )
    table(f"{rounds} rounds, {number} jobs", "s")
    for name, values in times.items():
        row(name, spread(values))
    without, with_tracker = times.values()
    goal("\nratio", ratios(with_tracker, without), most=1.15)
    print(f"complete runs at the end of the sweep: {', '.join(map(str, arrived))} of {number}")


if __name__ == "__main__":
    main()
