"""Overhead of trackers: time per record and per iteration, and memory and speed with 100,000 records.

    python scripts/benchmarks/tracker_overhead.py [--rounds 3] [--records 100000]

Rounds: trainings on digits in separate processes, in rotating order: with only the logger; with
`hooks=[mlflow,wandb,tensorboard]` (SQLite, offline); and with calls of the libraries in the training thread, which take
turns within one process. A record has ten values and is made every 10 iterations (by hand every 5). Each call in the
training thread is timed between iterations, when it is not in the processor's caches, and 50 times directly after
another call, after training. Iterations are timed with and without the first seconds, in which the trackers' processes
import their libraries.

Catching up: a training makes many records within seconds. Reported is the peak of the resident memory of its process
and of the trackers' processes. With 10,000 records and MLflow alone, its speed is compared with that of a bare script
that sends as many with `MlflowClient.log_batch`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from measure import environment, goal, machine, project, ratios, row, spread, table

WORKER = Path(__file__).with_name("tracker_hooks.py")
SETTLED = 5.0
"""Seconds in which the trackers' processes import their libraries and open the run."""
AT_ONCE = 100
"""Records per iteration, when there are many."""
LONGEST = 500
"""Most seconds for catching up."""
TRACKERS = ("hooks=[mlflow,wandb,tensorboard]", "+hooks.wandb.init.mode=offline")
VARIANTS = {
    "the logger alone": ("TimedRecords", "10", "1"),
    "the logger and three trackers": ("TimedRecords", "10", "1", *TRACKERS),
    "by hand": ("ByHand", "5", "1"),
}
BARE = """
import sys, time
from mlflow import MlflowClient
from mlflow.entities import Metric
client = MlflowClient(tracking_uri=sys.argv[1])
run = client.create_run(client.create_experiment("bare")).info.run_id
names = [f"train/value_{number}" for number in range(10)]
begun = time.monotonic()
for batch in range(100):
    steps = range(100 * batch, 100 * batch + 100)
    client.log_batch(run, [Metric(name, step / 7, 1000 * step, step) for step in steps for name in names])
print(100_000 / (time.monotonic() - begun))
"""
"""Prints the metrics per second of 100 batches of 1,000, the most that MLflow accepts."""


def main() -> None:
    """Run the benchmark and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=2000, help="iterations of a training")
    parser.add_argument("--records", type=int, default=100_000, help="records to catch up with")
    options = parser.parse_args()
    print(f"{machine()}, {options.rounds} rounds of {options.iterations} iterations\n")
    rounds(options.rounds, options.iterations)
    memory(options.records)
    speed(10_000)


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start a training in a folder."""
    command = [sys.executable, str(WORKER), *arguments]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=project(folder), env=environment(), **pipes)


def measured(process: subprocess.Popen[str], folder: Path) -> dict[str, Any]:
    """Return what a training has measured."""
    printed, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(printed[-4000:])
    return dict(json.loads((folder / "measured.json").read_text(encoding="utf-8")))


def rounds(number: int, iterations: int) -> None:
    """Train each variant in turn, and print the time per record and per iteration."""
    calls: dict[str, dict[str, list[float]]] = defaultdict(lambda: {"took_in_a_row": [], "took": []})
    ended: dict[str, list[list[float]]] = defaultdict(list)
    names = [*VARIANTS]
    for round_ in range(number):
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            with tempfile.TemporaryDirectory() as folder:
                process = start(Path(folder), *VARIANTS[name], f"engine.max_iters={iterations}")
                found = measured(process, Path(folder))
            ended[name].append(found["ended"])
            for when in ("took_in_a_row", "took"):
                for call, took in found[when].items():
                    shown = name if call == "hydraloop" else call
                    calls[shown][when].append(1e6 * statistics.median(took))
    table("a record, µs in the training thread", "consecutive", "between iterations")
    for name, times in calls.items():
        row(name, *(spread(values, 1) for values in times.values()))
    alone, tracked = names[:2]
    print()
    goal("a record with three trackers, consecutive, µs", calls[tracked]["took_in_a_row"], most=20, digits=1)
    for what, settled in (("an iteration with trackers", 0.0), ("after the imports", SETTLED)):
        slower = ratios(iteration_times(ended[tracked], settled), iteration_times(ended[alone], settled))
        print(f"{what}: {spread([100 * (ratio - 1) for ratio in slower], 1)} % slower")


def iteration_times(rounds: Sequence[Sequence[float]], settled: float) -> list[float]:
    """Return the seconds per iteration of each round, without the first `settled` seconds."""
    counted = [[end for end in ended if end >= ended[0] + settled] for ended in rounds]
    return [(ended[-1] - ended[0]) / (len(ended) - 1) for ended in counted]


def catching_up(folder: Path, records: int, *line: str) -> tuple[dict[str, float], float]:
    """Make many records at once. Returns the peak memory by process [MiB], and MLflow's records per second."""
    iterations = f"engine.max_iters={records // AT_ONCE}"
    process = start(folder, "TimedRecords", "1", str(AT_ONCE), iterations, *line)
    peaks: dict[str, float] = defaultdict(float)
    cursor, seen = folder / "run" / "tracking" / "mlflow.cursor.json", [(0.0, 0)]
    while process.poll() is None:
        with suppress(psutil.Error):
            for one in psutil.Process(process.pid).children(recursive=True):
                with suppress(psutil.Error):
                    name = one.cmdline()[-1] if one.name().startswith("python") else one.name()
                    peaks[name] = max(peaks[name], one.memory_info().rss / 2**20)
            peaks["training"] = max(peaks["training"], psutil.Process(process.pid).memory_info().rss / 2**20)
        sent = json.loads(cursor.read_text(encoding="utf-8"))["index"] if cursor.exists() else 0
        if sent > seen[-1][1]:
            seen.append((time.monotonic(), sent))
        time.sleep(0.05)
    measured(process, folder)
    (begun, first), (ended, last) = seen[1], seen[-1]
    return dict(peaks), (last - first) / (ended - begun)


def memory(records: int) -> None:
    """Print the memory of all processes with three trackers."""
    waits = [f"hooks.{name}.flush_timeout={LONGEST}" for name in ("mlflow", "wandb", "tensorboard")]
    with tempfile.TemporaryDirectory() as folder:
        peaks, _ = catching_up(Path(folder), records, *TRACKERS, *waits)
    print()
    table(f"peak memory with {records:,} records", "MiB")
    for name, peak in peaks.items():
        row(name, f"{peak:,.0f}")


def speed(records: int) -> None:
    """Print MLflow's speed, and that of a bare script."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        line = ("hooks=[mlflow]", f"hooks.mlflow.flush_timeout={LONGEST}")
        rate = 10 * catching_up(folder, records, *line)[1]
        bare = [sys.executable, "-c", BARE, f"sqlite:///{folder / 'bare.db'}"]
        by_hand = float(subprocess.run(bare, check=True, capture_output=True, text=True).stdout)
    print()
    goal("MLflow's metrics a second", [rate], least=15_000, digits=0)
    print(f"a bare script with MlflowClient: {by_hand:,.0f}; ratio {rate / by_hand:.2f}")


if __name__ == "__main__":
    main()
