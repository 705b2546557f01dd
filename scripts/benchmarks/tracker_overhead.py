"""Overhead of trackers: time per record and per iteration, and memory and speed with 100,000 records.

    python scripts/benchmarks/tracker_overhead.py [--rounds 3] [--records 100000]

Rounds: trainings on digits in separate processes, in rotating order: with only the logger; with
`hooks=[mlflow,wandb,tensorboard]` (SQLite, offline); and with calls of the libraries in the training thread, which take
turns within one process. A record has ten values and is made every 10 iterations (by hand every 5). Each call in the
training thread is timed between iterations, when it is not in the processor's caches, and 50 times directly after
another call, after training. Iterations are timed with and without the first seconds, in which the trackers' processes
import their libraries.

Catching up: a training makes many records within seconds. Reported is the peak of the resident memory of its process
and of the trackers' processes.

    python scripts/benchmarks/tracker_overhead.py TimedRecords|ByHand INTERVAL AT_ONCE [override ...]

is one training, in a project folder: its hook makes records of ten values and times the calls.
"""

from __future__ import annotations

import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil
from measure import environment, goal, machine, parser, project, ratios, row, spread, table

import hydraloop

VALUES = 10
IN_A_ROW = 50
"""Number of calls one after the other, after training."""
USUAL = (
    "engine.val_interval=null",
    "engine.test=false",
    "data.loader.batch_size=64",
    "default_hooks.logger.interval=null",
    "default_hooks.checkpoint.interval=null",
)
Way = Callable[[int, dict[str, float]], object]
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


def main() -> None:
    """Run the benchmark and print the tables."""
    options = parser(__doc__, rounds=3, iterations=2000, records=100_000).parse_args()
    print(f"{machine()}, {options.rounds} rounds of {options.iterations} iterations\n")
    rounds(options.rounds, options.iterations)
    memory(options.records)


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start a training in a folder."""
    command = [sys.executable, __file__, *arguments]
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


def catching_up(folder: Path, records: int, *line: str) -> dict[str, float]:
    """Make many records at once. Return the peak memory by process [MiB]."""
    iterations = f"engine.max_iters={records // AT_ONCE}"
    process = start(folder, "TimedRecords", "1", str(AT_ONCE), iterations, *line)
    peaks: dict[str, float] = defaultdict(float)
    while process.poll() is None:
        with suppress(psutil.Error):
            for one in psutil.Process(process.pid).children(recursive=True):
                with suppress(psutil.Error):
                    name = "sender" if one.name().startswith("python") else one.name()
                    peaks[name] = max(peaks[name], one.memory_info().rss / 2**20)
            peaks["training"] = max(peaks["training"], psutil.Process(process.pid).memory_info().rss / 2**20)
        time.sleep(0.05)
    measured(process, folder)
    return dict(peaks)


def memory(records: int) -> None:
    """Print the memory of all processes with three trackers."""
    waits = [f"hooks.{name}.flush_timeout={LONGEST}" for name in ("mlflow", "wandb", "tensorboard")]
    with tempfile.TemporaryDirectory() as folder:
        peaks = catching_up(Path(folder), records, *TRACKERS, *waits)
    print()
    table(f"peak memory with {records:,} records", "MiB")
    for name, peak in peaks.items():
        row(name, f"{peak:,.0f}")


class TimedRecords(hydraloop.Hook):
    """Makes records at an interval. Stores the duration of each call and the time at which each iteration ended.

    Args:
        interval: iterations between two records.
        at_once: number of records at each interval. Each one has the number of the next iteration.
    """

    def __init__(self, *, interval: int, at_once: int = 1) -> None:
        self.interval, self.at_once = interval, at_once
        self.made = 0
        self.took: dict[str, list[float]] = {}
        """Seconds of each call between iterations, by name of the call."""
        self.took_in_a_row: dict[str, list[float]] = {}
        """Seconds of each call directly after another one, by name of the call."""
        self.ended: list[float] = []
        """Time at which each iteration ended, in seconds."""

    def ways(self, engine: hydraloop.Engine) -> dict[str, Way]:
        """Functions that make a record from an iteration and its values, by name."""
        return {"hydraloop": lambda at, values: engine.log_record({"mode": "train", "iteration": at, **values})}

    def before_train(self, engine: hydraloop.Engine) -> None:
        """Set the order of the functions."""
        self._turns = list(self.ways(engine).items())

    def after_train_iter(
        self, engine: hydraloop.Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]
    ) -> None:
        """Make records at the interval."""
        self.ended.append(perf_counter())
        if engine.progress.iteration % self.interval == 0:
            for _ in range(self.at_once):
                name, way = self._turns[self.made % len(self._turns)]
                iteration = engine.progress.iteration if self.at_once == 1 else self.made + 1
                self._call(way, iteration, self.took.setdefault(name, []))

    def after_train(self, engine: hydraloop.Engine) -> None:
        """Make more records, one after the other."""
        for name, way in self._turns:
            for number in range(IN_A_ROW):
                self._call(way, engine.progress.iteration + number + 1, self.took_in_a_row.setdefault(name, []))

    def _call(self, way: Way, iteration: int, took: list[float]) -> None:
        self.made += 1
        values = {f"value_{number}": self.made / (number + 7) for number in range(VALUES)}
        start = perf_counter()
        way(iteration, values)
        took.append(perf_counter() - start)


class ByHand(TimedRecords):
    """Does the same with each library's functions in the training thread. Each record uses the next function."""

    def before_train(self, engine: hydraloop.Engine) -> None:
        """Import the libraries and open their outputs."""
        import mlflow
        import torch.utils.tensorboard
        import wandb

        here = Path.cwd()
        self._mlflow = mlflow.MlflowClient(tracking_uri=f"sqlite:///{here}/mlflow.db")
        self._run_id = self._mlflow.create_run(self._mlflow.create_experiment("by hand")).info.run_id
        self._wandb = wandb.init(mode="offline", dir=str(here), settings=wandb.Settings(console="off", silent=True))
        self._board = torch.utils.tensorboard.SummaryWriter(str(here / "board"))
        self._file = (here / "by_hand.jsonl").open("a", encoding="utf-8")
        self._waiting: list[Any] = []
        super().before_train(engine)

    def after_train(self, engine: hydraloop.Engine) -> None:
        """Make the remaining records, and close the outputs."""
        super().after_train(engine)
        while self._waiting:
            self._waiting.pop().wait()
        self._wandb.finish()
        self._board.close()
        self._file.close()

    def ways(self, engine: hydraloop.Engine) -> dict[str, Way]:
        """Functions by name. The one that leaves work to threads comes last."""
        return {
            "one line of JSON, flushed": self._write,
            "MLflow's log_metric, one value": self._log_metric,
            "ten TensorBoard scalars": self._add_scalars,
            "wandb.log": lambda at, values: self._wandb.log(values, step=at),
            "MLflow's log_metric, one value, asynchronous": self._log_metric_later,
        }

    def _log_metric(self, step: int, values: dict[str, float]) -> None:
        self._mlflow.log_metric(self._run_id, "value", values["value_0"], step=step)

    def _log_metric_later(self, step: int, values: dict[str, float]) -> None:
        sent = self._mlflow.log_metric(self._run_id, "later", values["value_0"], step=step, synchronous=False)
        self._waiting.append(sent)

    def _add_scalars(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def _write(self, step: int, values: dict[str, float]) -> None:
        self._file.write(json.dumps({"iteration": step, **values}) + "\n")
        self._file.flush()


def train(hook: str, interval: str, at_once: str, *overrides: str) -> None:
    """Train with a hook in the working directory, a project, and write what it has measured to `measured.json`."""
    logging.disable(logging.INFO)  # no lines in the terminal
    added = [f"+hooks.timed={{_target_: tracker_overhead.{hook}, interval: {interval}, at_once: {at_once}}}"]
    cfg = hydraloop.compose([*USUAL, *overrides, *added], folder=Path.cwd(), trusted=["tracker_overhead"])
    engine = hydraloop.build(cfg, run_dir=Path("run"))
    engine.train()
    timed: Any = engine.hooks["timed"]
    measured = {"took": timed.took, "took_in_a_row": timed.took_in_a_row, "ended": timed.ended}
    Path("measured.json").write_text(json.dumps(measured), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in ("TimedRecords", "ByHand"):
        train(*sys.argv[1:])
    else:
        main()
