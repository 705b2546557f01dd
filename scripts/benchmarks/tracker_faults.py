"""What happens to a run when its trackers break: injects faults and reports what the services have in the end.

    python scripts/benchmarks/tracker_faults.py [--rounds 3] [--quick] [--sync-every-round] [--only server_killed …]

Each fault has its own project folder and trains on digits from the command line: 200 records, 1,000 iterations. What
arrived is read back from the services: MLflow's metric history; W&B's files, in the end uploaded by `wandb sync` to a
stand-in for the service; TensorBoard's event files. A record counts if all its metrics are there. A step that is there
more than once is an error.

The time per iteration includes everything in the loop. It is compared with that of the same command without a tracker,
which runs before and after every few faults. The order of the faults rotates. Figures are medians over the rounds, with
minimum and maximum. Services that stand for other machines have a lower priority than training.

Prints a Markdown table. A full disk and a read-only folder need mounts. If the system does not allow mounts, not even
with `unshare`, these faults are skipped, and the output says so.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tracker_place import TOTAL, Had, Place, TooLateError, Training, template
from tracking_services import MLflowServer, Proxy, SmallDisk, free_port, in_own_mounts, stopped
from wandb_service import KEY, serving

ALL = ("mlflow", "wandb", "tensorboard")
USUAL = (
    f"engine.max_iters={5 * TOTAL}",
    "engine.val_interval=null",
    "engine.test=false",
    "data.loader.batch_size=64",
    "default_hooks.logger.interval=5",
    "default_hooks.checkpoint.interval=null",
)
BETWEEN = 4
"""Faults between two trainings without a tracker."""

Story = Generator[None, Training, None]
"""A fault. It prepares a place, receives the training, breaks something, and repairs it after the run for `sync`."""

Fault = Callable[[Place], Story]

# The faults. ---------------------------------------------------------------------------------------------------------


def nothing(place: Place) -> Story:
    """none; all three trackers"""
    place.hooks = ALL
    place.overrides = ["hooks.wandb.mode=offline"]
    yield
    yield


def server_killed(place: Place) -> Story:
    """MLflow server killed (`kill -9`) at record {at}, started again at record 150"""
    server = _server(place)
    server.start()
    place.overrides = [f"hooks.mlflow.tracking_uri={server.uri}"]
    training = yield
    training.until(50, sent=["mlflow"])
    server.kill()
    training.until(150)
    server.begin()
    yield
    server.kill()
    server.start()


def server_down(place: Place) -> Story:
    """MLflow server down until after the run"""
    server = _server(place)
    place.overrides = [f"hooks.mlflow.tracking_uri={server.uri}"]
    yield
    yield
    server.start()


def server_silent(place: Place) -> Story:
    """MLflow server accepts and never answers"""
    silent = Proxy()
    place.cleanup.enter_context(stopped(silent))
    place.overrides = [f"hooks.mlflow.tracking_uri={silent.uri}"]
    yield
    yield
    silent.close()
    server = _server(place, port=silent.port)
    server.start()


def server_slow(place: Place) -> Story:
    """MLflow server answers 0.5 s late"""
    server = _server(place)
    server.start()
    slow = Proxy(server.port)
    place.cleanup.enter_context(stopped(slow))
    slow.delay = 0.5
    place.overrides = [f"hooks.mlflow.tracking_uri={slow.uri}"]
    yield
    yield
    slow.delay = 0.0


def wandb_core_killed(place: Place) -> Story:
    """`wandb-core` killed (`kill -9`) at record {at}"""
    place.hooks = ("wandb",)
    place.overrides = ["hooks.wandb.mode=offline"]
    training = yield
    training.until(50, sent=["wandb"])
    _kill(training, "wandb-core")
    yield


def followers_killed(place: Place) -> Story:
    """all three trackers' own processes killed (`kill -9`) at record {at}"""
    place.hooks = ALL
    place.overrides = ["hooks.wandb.mode=offline"]
    training = yield
    training.until(50, sent=ALL)
    _kill(training, "hydraloop.tracking")
    yield


def wandb_no_network(place: Place) -> Story:
    """W&B online, no network until after the run"""
    place.hooks = ("wandb",)
    port = free_port()
    place.environment = {"WANDB_BASE_URL": f"http://127.0.0.1:{port}", "WANDB_API_KEY": KEY}
    yield
    yield
    place.wandb = place.cleanup.enter_context(serving(port))


def disk_full(place: Place) -> Story:
    """disk of `mlflow.db` full from record {at} on"""
    disk = _disk(place)
    place.overrides = [f"hooks.mlflow.tracking_uri=sqlite:///{place.database}"]
    training = yield
    training.until(50, sent=["mlflow"])
    disk.fill()
    yield
    disk.empty()


def disk_read_only(place: Place) -> Story:
    """folder of `mlflow.db` read-only"""
    disk = _disk(place)
    disk.make_read_only(True)
    place.overrides = [f"hooks.mlflow.tracking_uri=sqlite:///{place.database}"]
    yield
    yield
    disk.make_read_only(False)


def uri_malformed(place: Place) -> Story:
    """malformed `MLFLOW_TRACKING_URI`, put right before `sync`"""
    place.environment = {"MLFLOW_TRACKING_URI": "htp:/tracking.example:5000"}
    yield
    yield
    place.environment = {"MLFLOW_TRACKING_URI": f"sqlite:///{place.database}"}


def experiment_deleted(place: Place) -> Story:
    """MLflow experiment deleted, restored before `sync`"""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{place.database}")
    experiment = client.create_experiment("digits")
    client.delete_experiment(experiment)
    yield
    yield
    client.restore_experiment(experiment)


def training_killed(place: Place) -> Story:
    """training itself killed (`kill -9`) at record {at}, all three trackers"""
    place.hooks = ALL
    place.overrides = ["hooks.wandb.mode=offline"]
    training = yield
    training.until(TOTAL // 2)
    training.kill()
    yield


def _server(place: Place, port: int | None = None) -> MLflowServer:
    folder = place.folder / "server"
    folder.mkdir()
    place.move_database(folder)
    server = MLflowServer(folder, port=port)
    place.cleanup.enter_context(stopped(server))
    return server


def _disk(place: Place) -> SmallDisk:
    disk = place.cleanup.enter_context(closing(SmallDisk(place.folder / "disk")))
    place.move_database(disk.folder)
    return disk


def _kill(training: Training, what: str) -> None:
    found = training.processes(what)
    assert found, f"there is a process {what}"
    for process in found:
        process.kill()


# Measuring. ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Outcome:
    """Result of one training with a fault, or without a tracker."""

    code: int
    iteration_time: float
    """Seconds per iteration."""
    ending_time: float
    """Seconds from the last record to the end of the process."""
    at_end: dict[str, Had]
    after_sync: dict[str, Had]
    struck: int | None = None
    """Number of records when the fault was injected. It is injected once the trackers have begun."""
    baseline: float = 0.0
    """Seconds per iteration without a tracker, at about the same time."""

    @property
    def slower(self) -> float:
        """Slowdown by the trackers, in percent."""
        return 100 * (self.iteration_time / self.baseline - 1)


class Rounds:
    """Runs faults, and trainings without a tracker between them.

    Args:
        folder: folder for all project folders.
        flush_timeout: `flush_timeout` of the trackers, in seconds.
    """

    def __init__(self, folder: Path, flush_timeout: float) -> None:
        self._folder, self._flush_timeout = folder, flush_timeout
        self._template = template(folder)
        self._places = 0
        self.baselines: list[Outcome] = []
        self.outcomes: dict[str, list[Outcome]] = {}
        self.remarks: list[str] = []

    def run(self, faults: Sequence[Fault], *, synced: bool) -> None:
        """Run one round.

        Args:
            faults: the faults, in order.
            synced: whether `sync` runs after each fault.
        """
        around = [self._without()]
        waiting: list[Outcome] = []
        for number, fault in enumerate(faults, start=1):
            try:
                outcome = self._with(fault, synced)
            except TooLateError as error:
                self.remarks.append(f"{fault.__name__}: {error}")
            else:
                self.outcomes.setdefault(fault.__name__, []).append(outcome)
                waiting.append(outcome)
            if number % BETWEEN == 0 or number == len(faults):
                around.append(self._without())
                for one in waiting:
                    one.baseline = statistics.mean(each.iteration_time for each in around[-2:])
                waiting = []
        self.baselines += around

    def _without(self) -> Outcome:
        place = self._place()
        place.hooks = ()
        with place.cleanup:
            training = place.train(*USUAL)
            code = training.wait()
            return Outcome(code, training.iteration_time, training.ending_time, {}, {})

    def _with(self, fault: Fault, synced: bool) -> Outcome:
        place = self._place()
        with place.cleanup:
            story = fault(place)
            next(story)
            timeouts = [f"hooks.{hook}.flush_timeout={self._flush_timeout}" for hook in place.hooks]
            training = place.train(*USUAL, *timeouts)
            story.send(training)
            code = training.wait()
            times = training.iteration_time, training.ending_time
            outcome = Outcome(code, *times, place.has(), {}, training.struck)
            printed = training.printed.splitlines()[-15:]
            if synced:
                next(story, None)
                printed += place.sync().splitlines()
                outcome.after_sync = place.has(uploaded=True)
        self._judge(fault.__name__, printed, outcome)
        return outcome

    def _judge(self, name: str, printed: Sequence[str], outcome: Outcome) -> None:
        """Add a remark about anything wrong, with what was printed."""
        wrong = []
        for when, found in (("at the end", outcome.at_end), ("after sync", outcome.after_sync)):
            for hook, had in found.items():
                if had.twice:
                    wrong.append(f"{hook} has {had.twice} steps more than once {when}")
                if had.claimed > had.there:
                    wrong.append(f"{hook} has {had.there} records {when}, and {had.claimed} are claimed")
        wrong += [
            f"{hook} has {had.there} of {had.made} records after sync"
            for hook, had in outcome.after_sync.items()
            if had.there != had.made
        ]
        if wrong:
            self.remarks += [f"{name}: {'; '.join(wrong)}", *(f"    | {line}" for line in printed)]

    def _place(self) -> Place:
        self._places += 1
        return Place(self._folder / str(self._places), self._template)


FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        nothing,
        server_killed,
        server_down,
        server_silent,
        server_slow,
        wandb_core_killed,
        followers_killed,
        wandb_no_network,
        disk_full,
        disk_read_only,
        uri_malformed,
        experiment_deleted,
        training_killed,
    )
}
"""By name, in the table's order. The docstring is the text in the table, with the records at which the fault came."""


def main() -> None:
    """Run the benchmark and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--only", nargs="+", choices=sorted(FAULTS), metavar="FAULT", help=", ".join(FAULTS))
    parser.add_argument("--flush-timeout", type=float, default=3.0, help="seconds, for each tracker")
    parser.add_argument("--sync-every-round", action="store_true", help="run sync in each round, not only the first")
    options = parser.parse_args()
    mounts = in_own_mounts()
    names = [name for name in FAULTS if name in (options.only or FAULTS) and (mounts or not name.startswith("disk"))]
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hydraloop-faults-") as folder:
        rounds = Rounds(Path(folder), options.flush_timeout)
        number = 1 if options.quick else options.rounds
        for turn in range(number):
            first = turn * len(names) // number
            synced = turn == 0 or options.sync_every_round
            rounds.run([FAULTS[name] for name in names[first:] + names[:first]], synced=synced)
            print(f"round {turn + 1} of {number}, {time.monotonic() - start:.0f} s", file=sys.stderr)
    report(rounds, number)
    if not mounts:
        print("\ndisk_full, disk_read_only: not measured, because this system does not allow mounts")
    for remark in rounds.remarks:
        print(remark)


def report(rounds: Rounds, number: int) -> None:
    """Print the table."""
    times = [1000 * one.iteration_time for one in rounds.baselines]
    ends = [one.ending_time for one in rounds.baselines]
    print(f"{number} rounds of {TOTAL} records; without a tracker {_spread(times, '{:.2f}')} ms an iteration, ", end="")
    print(f"and {_spread(ends, '{:.1f}')} s from the last record to the end of the process\n")
    print("| fault | exit code | at the run's end | after `sync` | twice | slower, % | end, s |")
    print("|---|---|---|---|---|---|---|")
    for name, outcomes in rounds.outcomes.items():
        cells = [
            _described(name, [one.struck for one in outcomes if one.struck is not None]),
            "/".join(sorted({str(one.code) for one in outcomes})),
            _counts([one.at_end for one in outcomes]),
            _counts([one.after_sync for one in outcomes if one.after_sync]),
            str(max(had.twice for one in outcomes for had in (*one.at_end.values(), *one.after_sync.values()))),
            _spread([one.slower for one in outcomes], "{:+.1f}"),
            _spread([one.ending_time for one in outcomes], "{:.1f}"),
        ]
        print(f"| {' | '.join(cells)} |")


def _described(name: str, struck: Sequence[int]) -> str:
    return (FAULTS[name].__doc__ or "").format(at=_range(struck) if struck else "")


def _counts(found: Sequence[dict[str, Had]]) -> str:
    """Return `200 of 200`, `120-150 of 200` if rounds differ, with names of trackers if these differ."""
    texts = {}
    for hook in found[0] if found else ():
        texts[hook] = f"{_range([had[hook].there for had in found])} of {_range([had[hook].made for had in found])}"
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return ", ".join(f"{hook} {text}" for hook, text in texts.items())


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}-{high}"


def _spread(values: Sequence[float], form: str) -> str:
    low, middle, high = (form.format(value) for value in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low} to {high})"


if __name__ == "__main__":
    main()
