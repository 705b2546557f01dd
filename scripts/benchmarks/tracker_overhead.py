"""Overhead of trackers: time per record and per iteration, and memory and speed with 100,000 records.

    python scripts/benchmarks/tracker_overhead.py [--rounds 3] [--records 100000] [--quick] [--only rounds|catching_up]

Rounds: trainings on digits in separate processes, in rotating order: with only the logger; with
`hooks=[mlflow,wandb,tensorboard]` (SQLite, offline); and with calls of the libraries in the training thread, which take
turns within one process. A record has ten values and is made every 10 iterations (by hand every 5,
because there are several libraries). Each call in the training thread is timed between iterations, when it is not in
the processor's caches, and 50 times directly after another call, after training. Goal: at most 20 µs per record
directly after another one. Iterations are timed with and without the first seconds, in which the followers import their
libraries.

Catching up: a training makes 100,000 records within seconds. Reported are the resident memory of its process and of
each follower while they catch up, and their speed. Goal: MLflow stores 15,000 metrics per second in SQLite. Most of the
time is spent in MLflow, so a bare script then sends 10,000 such records with `MlflowClient.log_batch`, for a ratio.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from tracker_hooks import VALUES
from tracker_place import ROOT, Place, template
from tracker_worker import MEASURED, RUN

from hydraloop.run.record_log import FILENAME
from hydraloop.tracking.cursor import Cursor

GOAL = 20.0
"""µs per record."""
RATE = 15_000
"""Metrics per second."""
SETTLED = 5.0
"""Seconds in which followers import their libraries and open the run."""
AT_ONCE = 100
"""Records per iteration, when there are many."""
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
LONGEST = 500
"""Most seconds for catching up."""
CORE = "wandb-core"
ALL = ("mlflow", "wandb", "tensorboard")
TRACKERS = (f"hooks=[{','.join(ALL)}]", "hooks.wandb.mode=offline")

VARIANTS: dict[str, tuple[str, ...]] = {
    "logger": ("TimedRecords", "10", "1"),
    "logger and three trackers": ("TimedRecords", "10", "1", *TRACKERS),
    "by hand": ("ByHand", "5", "1"),
}


def main() -> None:
    """Run the benchmark and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=2000, help="iterations of a training")
    parser.add_argument("--records", type=int, default=100_000, help="records to catch up with")
    parser.add_argument("--quick", action="store_true", help="one round of 2000 iterations, 10,000 records")
    parser.add_argument("--only", choices=("rounds", "catching_up"))
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.iterations, options.records = 1, 2000, 10_000
    print(f"{platform.processor() or platform.machine()}, {psutil.cpu_count()} cores")
    with tempfile.TemporaryDirectory(prefix="hydraloop-overhead-") as folder:
        places = Places(Path(folder))
        if options.only != "catching_up":
            rounds(places, options.rounds, options.iterations)
        if options.only != "rounds":
            catching_up(places, options.records)


class Places:
    """Makes a project folder for each training."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._template = folder, template(folder)
        self._number = 0

    def new(self) -> Place:
        """Return a new folder."""
        self._number += 1
        return Place(self._folder / str(self._number), self._template)


def start(place: Place, *arguments: str) -> subprocess.Popen[str]:
    """Start a training in a folder."""
    return place.start([str(ROOT / "scripts" / "benchmarks" / "tracker_worker.py"), *arguments])


def result(process: subprocess.Popen[str], place: Place) -> dict[str, Any]:
    """Return what a training has measured."""
    out, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(out[-4000:])
    measured: dict[str, Any] = json.loads((place.folder / MEASURED).read_text(encoding="utf-8"))
    return measured


# A record, an iteration. ---------------------------------------------------------------------------------------------


def rounds(places: Places, number: int, iterations: int) -> None:
    """Train each variant in turn, and print the time per record and per iteration."""
    between: dict[str, list[list[float]]] = {}
    in_a_row: dict[str, list[list[float]]] = {}
    times: dict[str, list[list[float]]] = {}
    names = list(VARIANTS)
    for round_ in range(number):
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            place = places.new()
            measured = result(start(place, *VARIANTS[name], f"engine.max_iters={iterations}"), place)
            times.setdefault(name, []).append(measured["ended"])
            for kept, found in ((between, "took"), (in_a_row, "took_in_a_row")):
                for called, took in measured[found].items():
                    kept.setdefault(f"{name}: {called}", []).append([1e6 * seconds for seconds in took])
    print(f"\na record of {VALUES} values, µs in the training thread; {number} rounds of {iterations} iterations\n")
    print("| | between iterations: median (rounds) | p90 | p99 | one after the other: median (rounds) | p99 |")
    print("|---|---|---|---|---|---|")
    for called in between:
        middle, *high = _calls(between[called], 90, 99)
        print(f"| {' | '.join((called, middle, *high, *_calls(in_a_row[called], 99)))} |")
    ours = statistics.median(_all(in_a_row["logger and three trackers: hydraloop"]))
    print(f"\ngoal: at most {GOAL:g} µs one after the other, {'met' if ours <= GOAL else 'NOT met'}")
    print("\nms an iteration, a record every 10\n")
    print(f"| | all | after the first {SETTLED:g} s |\n|---|---|---|")
    for name in names[:2]:
        print(f"| {name} | {_spread(_means(times[name], 0.0))} | {_spread(_means(times[name], SETTLED))} |")
    ratios = []
    for settled in (0.0, SETTLED):
        pairs = zip(_means(times[names[1]], settled), _means(times[names[0]], settled), strict=True)
        ratios.append(_spread([100 * (ours / alone - 1) for ours, alone in pairs], "{:+.1f}"))
    print(f"| with trackers, % slower | {ratios[0]} | {ratios[1]} |")


def _all(rounds: Sequence[Sequence[float]]) -> list[float]:
    return [value for each in rounds for value in each]


def _calls(rounds: Sequence[Sequence[float]], *shares: int) -> list[str]:
    """Return the median, with minimum and maximum over the rounds, and percentiles of all calls."""
    middles = [statistics.median(each) for each in rounds]
    low, middle, high = min(middles), statistics.median(_all(rounds)), max(middles)
    hundredths = statistics.quantiles(_all(rounds), n=100)
    return [f"{middle:,.1f} ({low:,.1f} to {high:,.1f})", *(f"{hundredths[share - 1]:,.1f}" for share in shares)]


def _means(rounds: Sequence[Sequence[float]], settled: float) -> list[float]:
    """Return milliseconds per iteration, of those that ended at least `settled` seconds after the first."""
    means = []
    for ended in rounds:
        counted = [end for end in ended if end >= ended[0] + settled]
        means.append(1000 * (counted[-1] - counted[0]) / (len(counted) - 1) if len(counted) > 1 else math.nan)
    return means


def _spread(values: Sequence[float], form: str = "{:.2f}") -> str:
    low, middle, high = (form.format(value) for value in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low} to {high})"


# Many records. -------------------------------------------------------------------------------------------------------


class Watch:
    """Samples a training's processes, log and cursors.

    Args:
        process: the process of the training.
        run_dir: directory of the run.
    """

    def __init__(self, process: subprocess.Popen[str], run_dir: Path) -> None:
        self._process, self._run_dir = psutil.Process(process.pid), run_dir
        self.memory: dict[str, list[tuple[float, float]]] = {}
        """(seconds, MiB), by process."""
        self.come: dict[str, list[tuple[float, int]]] = {"training": [], **{name: [] for name in ALL}}
        """(seconds, position): of the training in bytes of its log, of trackers in records."""
        self.busy: dict[str, float] = {}
        """CPU seconds of each process."""

    def look(self) -> None:
        """Take one sample."""
        now = time.monotonic()
        with suppress(psutil.Error):
            for one in [self._process, *self._process.children(recursive=True)]:
                with suppress(psutil.Error):
                    name = self._name(one)
                    self.memory.setdefault(name, []).append((now, one.memory_info().rss / 2**20))
                    used = one.cpu_times()
                    self.busy[name] = used.user + used.system
        log = self._run_dir / FILENAME
        places = {"training": log.stat().st_size if log.exists() else 0}
        for name in ALL:
            cursor = Cursor.load(self._run_dir, name)
            places[name] = 0 if cursor is None else cursor.index
        for name, place in places.items():
            seen = self.come[name]
            if place > (seen[-1][1] if seen else 0):
                seen.append((now, place))

    def memory_at(self, process: str, share: float) -> float:
        """Return the MiB of a process when it had reached a share of its final position."""
        whose = "wandb" if process == CORE else process
        goal = share * self.come[whose][-1][1]
        when = next(now for now, place in self.come[whose] if place >= goal)
        return min(self.memory[process], key=lambda seen: abs(seen[0] - when))[1]

    def rate(self, tracker: str, since: float = 0.0) -> float:
        """Return the records per second that a tracker has sent after a time."""
        seen = [one for one in self.come[tracker] if one[0] >= since]
        return (seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0]) if len(seen) > 1 else math.nan

    def _name(self, process: psutil.Process) -> str:
        if process == self._process:
            return "training"
        line = process.cmdline()
        return line[-1] if "hydraloop.tracking.sender" in line else process.name()


def catching_up(places: Places, records: int) -> None:
    """Make many records at once, and print how the followers catch up."""
    place = places.new()
    waits = [f"hooks.{name}.flush_timeout={LONGEST}" for name in ALL]
    iterations = f"engine.max_iters={records // AT_ONCE}"
    process = start(place, "TimedRecords", "1", str(AT_ONCE), iterations, *TRACKERS, *waits)
    watch = Watch(process, place.folder / RUN)
    while process.poll() is None:
        watch.look()
        time.sleep(0.1)
    measured = result(process, place)
    made = measured["ended"][-1] - measured["ended"][0]
    print(f"\n{records:,} records of {VALUES} values, made in {made:.1f} s; resident memory in MiB\n")
    print("| process | with a tenth of them | half | all | peak |\n|---|---|---|---|---|")
    for name in ("training", *ALL, CORE):
        sizes = [
            *(watch.memory_at(name, share) for share in (0.1, 0.5, 1.0)),
            max(size for _, size in watch.memory[name]),
        ]
        print(f"| {name} | {' | '.join(f'{size:,.0f}' for size in sizes)} |")
    print("\n| tracker | records sent | metrics a second | metrics a second of its own CPU time |\n|---|---|---|---|")
    for name in ALL:
        sent = watch.come[name][-1][1]
        computed = watch.busy[name] + (watch.busy[CORE] if name == "wandb" else 0.0)
        print(f"| {name} | {sent:,} | {VALUES * watch.rate(name):,.0f} | {VALUES * sent / computed:,.0f} |")
    alone = max(watch.come[name][-1][0] for name in ALL if name != "mlflow")
    rate = VALUES * watch.rate("mlflow", alone)
    bare = [sys.executable, "-c", BARE, f"sqlite:///{place.folder / 'bare.db'}"]
    by_hand = float(subprocess.run(bare, check=True, capture_output=True, text=True).stdout)
    print(f"\nmlflow once the others are done: {rate:,.0f} metrics a second;", end=" ")
    print(f"goal: at least {RATE:,}, {'met' if rate >= RATE else 'NOT met'}")
    print(f"a bare script with MlflowClient: {by_hand:,.0f}; ratio {rate / by_hand:.2f}")


if __name__ == "__main__":
    main()
