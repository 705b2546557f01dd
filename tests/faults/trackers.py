"""Breaks the trackers of runs, and prints what the services have: `python -m tests.faults.trackers [rounds] [fault …]`.

Each run has its own project folder and trains the digits: 200 records, 1,000 iterations. A record counts if all its
metrics are there. W&B's offline files are uploaded by `wandb sync` to a stand-in for the service after `sync`.

The time of an iteration includes everything in the loop. It is compared with that of a run without a tracker in the
same round. The order of the faults rotates. Figures are medians over the rounds, with minimum and maximum.

A full disk and a read-only folder need the right to mount; without it, these faults are left out. The exit code is 1 if
a record is lost or twice there.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.projects import Project, Run
from tests.e2e.trackers.http_proxy import http_proxy
from tests.e2e.trackers.tracked import Points, mlflow_runs, points, tensorboard_points, wandb_runs
from tests.faults import tables
from tests.processes import running_in, until
from tests.small_disk import small_disk
from tests.tracking.mlflow.server import MLflowServer, free_port, mlflow_server
from tests.tracking.wandb.service import KEY, Service, serving

TOTAL = 200
"""Records of a training."""
LINE = (
    f"engine.max_iters={5 * TOTAL}",
    "engine.val_interval=null",
    "engine.test=false",
    "engine.threads=1",
    "data.loader.batch_size=64",
    "default_hooks.logger.interval=5",
    "default_hooks.checkpoint.interval=null",
)
FLUSH_TIMEOUT = 3
"""Seconds for each tracker at the end of a run."""
LONGEST = 300.0
"""Most seconds for a command."""
FOREVER = 1e6
"""Seconds after which a silent server would answer."""
ALL = ("mlflow", "wandb", "tensorboard")


class TooLateError(Exception):
    """Training ended before the fault."""


@dataclass
class Training:
    """A training whose trackers break, and what it is started with."""

    project: Project
    hooks: tuple[str, ...] = ("mlflow",)
    overrides: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    store: Path | None = None
    """The folder of `mlflow.db`; None: the project."""
    service: Service | None = None
    """The service of W&B, if the run is online."""
    struck: int | None = None
    """Number of records at the fault, which comes after the trackers have begun to send."""
    process: subprocess.Popen[str] | None = None
    cleanup: ExitStack = field(default_factory=ExitStack)

    def start(self) -> None:
        """Start the training without waiting for it."""
        timeouts = [f"hooks.{hook}.flush_timeout={FLUSH_TIMEOUT}" for hook in self.hooks]
        line = [f"hooks=[{','.join(self.hooks)}]", *LINE, *timeouts, *self.overrides]
        self.process = self.project.start(*line, environment=self.environment)
        self.cleanup.callback(self.process.kill)

    @property
    def run(self) -> Run:
        """The run, which exists once training has begun."""
        return self.project.run

    def until(self, record: int, *, sent: Sequence[str] = ()) -> None:
        """Wait for a number of records, and until the trackers in `sent` have begun to send.

        Raises:
            TooLateError: training ended before.
        """
        assert self.process is not None, "it was started"
        while True:
            logged = len(self.run.records) if self._has_records() else 0
            if logged >= record and all(self.cursor(name).get("index", 0) > 0 for name in sent):
                self.struck = self.struck or logged
                return
            if self.process.poll() is not None or logged >= TOTAL:
                raise TooLateError(f"training was over before record {record}, or before {', '.join(sent)} had begun")
            time.sleep(0.02)

    def _has_records(self) -> bool:
        return any(path.stat().st_size for path in self.project.path.glob("outputs/*/*/metrics.jsonl"))

    def cursor(self, name: str) -> dict[str, Any]:
        """Return the cursor of a tracker; empty if it has no cursor."""
        path = self.run.path / "tracking" / f"{name}.cursor.json"
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}

    def kill(self, word: str) -> None:
        """Kill its child processes with a word in their command line."""
        assert self.process is not None, "it was started"
        found = psutil.Process(self.process.pid).children(recursive=True)
        found = [process for process in found if word in " ".join(process.cmdline())]
        assert found, f"there is a process {word}"
        for process in found:
            process.kill()

    def wait(self) -> float:
        """Wait until the training and its trackers have ended. Returns when the training has ended."""
        assert self.process is not None, "it was started"
        printed = self.process.communicate(timeout=LONGEST)[0]
        ended = time.time()
        assert self._has_records(), printed
        until(lambda: not running_in(self.project.path), "its trackers have ended", seconds=LONGEST)
        return ended

    def has(self, name: str, *, uploaded: bool) -> Points:
        """Return what a tracker has.

        Args:
            uploaded: whether W&B's offline files are uploaded first.
        """
        if name == "mlflow":
            folder = self.store or self.project.path
            runs = mlflow_runs(folder) if (folder / "mlflow.db").exists() else []
            return _merged([one.points for one in runs])
        if name == "tensorboard":
            return tensorboard_points(self.run)
        if self.service is not None:
            return _rows(self.service)
        return self._upload() if uploaded else _merged([one.points for one in wandb_runs(self.run)])

    def _upload(self) -> Points:
        with serving() as service:
            account = {"WANDB_BASE_URL": service.url, "WANDB_API_KEY": KEY, "WANDB_MODE": "online"}
            for folder in self.run.path.glob("wandb/offline-run-*"):
                copy = shutil.copytree(folder, self.project.path / "uploaded" / folder.name)
                self.project.python("-m", "wandb", "sync", str(copy), **account)
            return _rows(service)


def _merged(found: Sequence[Points]) -> Points:
    merged = defaultdict(list)
    for one in found:
        for name, line in one.items():
            merged[name] += line
    return dict(merged)


def _rows(service: Service) -> Points:
    rows = [row for rows in service.rows.values() for row in rows.values()]
    return _merged([{name: [(int(row["iteration"]), value)] for name, value in row.items()} for row in rows])


# The faults. Each prepares a training, breaks something while it runs, and repairs it before `sync`. -----------------


def nothing(training: Training) -> Iterator[None]:
    """none; all three trackers"""
    _offline(training, *ALL)
    yield
    yield


def server_killed(training: Training) -> Iterator[None]:
    """MLflow server killed (`kill -9`) at record {at}, started again at record 150"""
    server = _server(training)
    yield
    training.until(50, sent=["mlflow"])
    server.kill()
    training.until(150)
    server.begin()
    yield
    server.kill()
    server.start()


def server_down(training: Training) -> Iterator[None]:
    """MLflow server down until after the run"""
    server = _server(training)
    server.kill()
    yield
    yield
    server.start()


def server_silent(training: Training) -> Iterator[None]:
    """MLflow server accepts and never answers"""
    yield from _behind_proxy(training, FOREVER)


def server_slow(training: Training) -> Iterator[None]:
    """MLflow server answers 0.5 s late"""
    yield from _behind_proxy(training, 0.5)


def wandb_core_killed(training: Training) -> Iterator[None]:
    """`wandb-core` killed (`kill -9`) at record {at}"""
    _offline(training, "wandb")
    yield
    training.until(50, sent=["wandb"])
    training.kill("wandb-core")
    yield


def followers_killed(training: Training) -> Iterator[None]:
    """all three trackers' own processes killed (`kill -9`) at record {at}"""
    _offline(training, *ALL)
    yield
    training.until(50, sent=ALL)
    training.kill("sync --follow")
    yield


def wandb_no_network(training: Training) -> Iterator[None]:
    """W&B online, no network until after the run"""
    port = free_port()
    training.hooks = ("wandb",)
    training.overrides = ["+hooks.wandb.init.mode=online"]
    training.environment = {"WANDB_BASE_URL": f"http://127.0.0.1:{port}", "WANDB_API_KEY": KEY}
    yield
    yield
    training.service = training.cleanup.enter_context(serving(port))


def disk_full(training: Training) -> Iterator[None]:
    """disk of `mlflow.db` full from record {at} on"""
    disk = _disk(training)
    yield
    training.until(50, sent=["mlflow"])
    with suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    yield
    (disk / "filler").unlink()


def disk_read_only(training: Training) -> Iterator[None]:
    """folder of `mlflow.db` read-only"""
    disk = _disk(training)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    yield
    yield
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)


def uri_malformed(training: Training) -> Iterator[None]:
    """malformed `MLFLOW_TRACKING_URI`, put right before `sync`"""
    training.environment = {"MLFLOW_TRACKING_URI": "htp:/tracking.example:5000"}
    yield
    yield
    training.environment = {"MLFLOW_TRACKING_URI": f"sqlite:///{training.project.path}/mlflow.db"}


def experiment_deleted(training: Training) -> Iterator[None]:
    """MLflow experiment deleted, restored before `sync`"""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{training.project.path}/mlflow.db")
    experiment = client.create_experiment("digits")
    client.delete_experiment(experiment)
    yield
    yield
    client.restore_experiment(experiment)


def training_killed(training: Training) -> Iterator[None]:
    """training itself killed (`kill -9`) at record {at}, all three trackers"""
    _offline(training, *ALL)
    yield
    training.until(TOTAL // 2)
    assert training.process is not None, "it was started"
    training.process.kill()
    yield


def _offline(training: Training, *hooks: str) -> None:
    training.hooks, training.overrides = hooks, ["+hooks.wandb.init.mode=offline"]


def _server(training: Training) -> MLflowServer:
    training.store = training.project.path / "server"
    training.store.mkdir()
    server = training.cleanup.enter_context(mlflow_server(training.store))
    training.overrides = [f"hooks.mlflow.tracking_uri={server.uri}"]
    return server


def _behind_proxy(training: Training, delay: float) -> Iterator[None]:
    proxy = training.cleanup.enter_context(http_proxy(_server(training).port))
    proxy.delay = delay
    training.overrides = [f"hooks.mlflow.tracking_uri={proxy.uri}"]
    yield
    yield
    proxy.delay = 0.0


def _disk(training: Training) -> Path:
    training.store = training.cleanup.enter_context(small_disk(training.project.path / "disk", 48))
    training.overrides = [f"hooks.mlflow.tracking_uri=sqlite:///{training.store}/mlflow.db"]
    return training.store


FAULTS: dict[str, Callable[[Training], Iterator[None]]] = {
    fault.__name__: fault
    for fault in (
        nothing, server_killed, server_down, server_silent, server_slow, wandb_core_killed, followers_killed,
        wandb_no_network, disk_full, disk_read_only, uri_malformed, experiment_deleted, training_killed,
    )
}  # fmt: skip
"""By name, in the table's order. The docstring is the text in the table."""


# The judge. ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """How a training with a fault, or without a tracker, has ended."""

    code: int
    """The exit code, as a shell reports it."""
    iteration_time: float
    """Seconds of an iteration."""
    ending_time: float
    """Seconds from the last record to the end of the process."""
    made: int
    """Number of records."""
    struck: int | None
    at_end: dict[str, int]
    """Number of records that each tracker has."""
    after_sync: dict[str, int]
    twice: int
    """Number of iterations that a tracker has more than once."""
    printed: str
    """By `sync`."""

    @property
    def is_wrong(self) -> bool:
        """Whether a record is lost or twice there."""
        return self.twice > 0 or any(there != self.made for there in self.after_sync.values())


def outcome(folder: Path, fault: Callable[[Training], Iterator[None]] | None) -> Outcome:
    """Train with a fault, or without a tracker."""
    training = Training(Project.make(folder))
    with training.cleanup:
        steps = iter(()) if fault is None else fault(training)
        if fault is None:
            training.hooks = ()
        next(steps, None)
        training.start()
        next(steps, None)
        ended = training.wait()
        assert training.process is not None, "it was started"
        code = training.process.returncode
        first, *_, last = training.run.records
        seconds = (last["timestamp"] - first["timestamp"]) / (last["iteration"] - first["iteration"])
        at_end, twice = judge(training, uploaded=False)
        next(steps, None)
        sync = ("-m", "hydraloop", "sync", "outputs")
        printed = training.project.python(*sync, **training.environment).text if training.hooks else ""
        after_sync, twice_later = judge(training, uploaded=True)
        made, end = len(training.run.records), ended - last["timestamp"]
    twice = max(twice, twice_later)
    shown = code if code >= 0 else 128 - code
    return Outcome(shown, seconds, end, made, training.struck, at_end, after_sync, twice, printed)


def judge(training: Training, *, uploaded: bool) -> tuple[dict[str, int], int]:
    """Return the number of records that each tracker has completely, and of iterations that one has more than once."""
    wanted: dict[int, set[str]] = defaultdict(set)
    for name, line in points(training.run).items():
        for iteration, _ in line if name.startswith("train/") else ():
            wanted[iteration].add(name)
    complete, twice = {}, 0
    for hook in training.hooks:
        found = training.has(hook, uploaded=uploaded)
        times = Counter((name, step) for name, line in found.items() for step, _ in line if name.startswith("train/"))
        complete[hook] = sum(all(times[name, step] for name in names) for step, names in wanted.items())
        twice = max(twice, len({step for (_, step), count in times.items() if count > 1}))
    return complete, twice


# The table. ----------------------------------------------------------------------------------------------------------


def main(rounds: int = 2, *names: str) -> int:
    """Return the exit code: 1 if a record is lost or twice there."""
    chosen, alone, outcomes, slower, wrong = [*(names or FAULTS)], [], defaultdict(list), defaultdict(list), 0
    with tempfile.TemporaryDirectory(prefix="hydraloop-faults-") as folder:
        for number in range(rounds):
            alone.append(outcome(Path(folder, f"{number} alone"), None))
            first = number * len(chosen) // rounds
            for name in chosen[first:] + chosen[:first]:
                try:
                    found = outcome(Path(folder, f"{number} {name}"), FAULTS[name])
                except (TooLateError, pytest.skip.Exception) as error:
                    print(f"{name}: not measured: {error}", file=sys.stderr)
                    continue
                outcomes[name].append(found)
                slower[name].append(100 * (found.iteration_time / alone[-1].iteration_time - 1))
                if found.is_wrong:
                    wrong += 1
                    print(f"{name}: {found}", file=sys.stderr)
    print(f"{rounds} rounds of {TOTAL} records; without a tracker ", end="")
    print(f"{_spread([1000 * one.iteration_time for one in alone])} ms an iteration\n")
    tables.head("fault", "exit code", "at the run's end", "after `sync`", "twice", "slower, %", "end, s")
    for name in chosen:
        if found := outcomes[name]:
            tables.row(*_cells(name, found), _spread(slower[name]), _spread([one.ending_time for one in found]))
    return int(wrong > 0)


def _cells(name: str, found: Sequence[Outcome]) -> list[str]:
    at = _range([one.struck for one in found if one.struck is not None])
    return [
        (FAULTS[name].__doc__ or "").format(at=at),
        _range([one.code for one in found]),
        f"{_range([there for one in found for there in one.at_end.values()])} of {_range([one.made for one in found])}",
        f"{_range([there for one in found for there in one.after_sync.values()])}",
        _range([one.twice for one in found]),
    ]


def _range(numbers: Sequence[int]) -> str:
    return "-".join(str(number) for number in sorted({min(numbers), max(numbers)})) if numbers else ""


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:2]), *sys.argv[2:]))
