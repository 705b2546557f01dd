"""Runs on disk as followers find them, and a tracker that fails on demand."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydraloop.files.metrics_log import FILENAME, Record
from hydraloop.files.metrics_writer import RecordLog
from hydraloop.tracking import run_description
from hydraloop.tracking.tracker import Attempt, Finish, RefusedError, Run, Tracker


def attempt(number: int = 0, iteration: int = 0, **params: Any) -> Attempt:
    """An attempt with a config of `params`."""
    return Attempt(
        number=number,
        iteration=iteration,
        params={"optimizer.lr": 0.1, "seed": 0, **params},
        config="optimizer:\n  lr: 0.1\nseed: 0\n",
        tags={"command": "python train.py", "host": "here", "world_size": "1"},
        began=time.time(),
        pid=1,
    )


def described_run(run_dir: Path, *attempts: Attempt) -> Run:
    """A run with a description in its directory."""
    run_dir.mkdir(parents=True, exist_ok=True)
    run = Run(run_dir.absolute(), "0123456789abcdef", "digits", "a/run", attempts or (attempt(),))
    run_description.write(run)
    return run


def track(run_dir: Path, name: str, kind: str, options: Mapping[str, Any] = {}) -> None:
    """Add a tracker to the description of a run."""
    run = run_description.read(run_dir)
    assert run is not None
    trackers = {**run.attempt.trackers, name: {"kind": kind, "options": dict(options)}}
    run_description.write(replace(run, attempts=(*run.attempts[:-1], replace(run.attempt, trackers=trackers))))


def log_records(run_dir: Path, count: int, *, first: int = 0, every: int = 10, **values: float) -> None:
    """Append records of training, one for each ten iterations, as the logger does."""
    log = RecordLog(run_dir / FILENAME)
    for index in range(first, first + count):
        iteration = every * (index + 1)
        log.append({"mode": "train", "epoch": 1, "iteration": iteration, "loss": 1 / iteration, **values})
    log.close()


TENSORBOARD = "hydraloop.tracking.tensorboard.TensorBoardTracker"


class Listed(Tracker):
    """Stores the records that it is sent in a list, and raises given errors once each."""

    def __init__(self, run: Run, memory: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(options, run, {} if memory is None else memory)
        self.opened = 0
        self.got: list[Record] = []
        self.finished: list[Finish] = []
        self.raises: list[Exception | None] = []
        """Errors of the next calls; None: no error."""
        self.refuses: set[int] = set()
        """Indices of records that it refuses."""
        self.rewounds: list[int] = []

    def _may_raise(self) -> None:
        error = self.raises.pop(0) if self.raises else None
        if error is not None:
            raise error

    def open(self) -> None:
        self._may_raise()
        self.opened += 1

    def send(self, records: Sequence[Record]) -> None:
        self._may_raise()
        if any(record.index in self.refuses for record in records):
            raise RefusedError("too long")
        self.got += records

    def rewound(self, index: int) -> int:
        self.rewounds.append(index)
        return index

    def finish(self, finish: Finish) -> None:
        self._may_raise()
        self.finished.append(finish)

    @property
    def where(self) -> str | None:
        return "there"
