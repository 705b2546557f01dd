"""Hooks that measure the engine's own loop; benchmarks put them into a run by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter, process_time
from typing import Any, NamedTuple

import torch

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook


class Took(NamedTuple):
    """What a round took, in seconds."""

    time: float
    cpu: float
    """Of this process's threads, which other work on the machine hardly changes."""


class Interleaved(Hook):
    """Times rounds of the engine's training loop, and in between, with that loop paused, rounds of another function.

    A round of the loop goes from the beginning of an iteration's hooks to that of the one `length` later: `length`
    batches fetched, `length` iterations, and whatever all the other hooks do. Ranks wait for each other and for their
    devices before and after each round of either. Which of the two comes first alternates (A B, B A, A B, …); the first
    round of each is a warm-up and not counted. The loop needs `length * (rounds + 1) + 1` iterations.

    Args:
        length: iterations of a round.
        rounds: how many are counted.
    """

    priority = 0  # first of all: what the other hooks do belongs to the round
    collective = True

    def __init__(self, *, length: int, rounds: int) -> None:
        self.length, self.rounds = length, rounds
        self.other: Callable[[int], None] | None = None
        """Does the other's `length` iterations."""
        self.ours: list[Took] = []
        """Each round of the loop, the warm-up left out."""
        self.theirs: list[Took] = []
        """The same of the other."""
        self._start = Took(0.0, 0.0)

    def before_train_iter(self, engine: Engine, batch_idx: int, batch: Any) -> None:
        """Between two rounds: take the time, let the other one run, begin the next."""
        begins, inside = divmod(engine.progress.iteration, self.length)
        if inside or begins > self.rounds + 1:
            return
        settle(engine)
        if begins:
            self.ours.append(_since(self._start))
        if begins % 2:  # after an even round of the loop, which comes first, and before an odd one, which comes second
            self._time_other(engine)
            if begins <= self.rounds:
                self._time_other(engine)
        if begins == self.rounds + 1:
            del self.ours[0], self.theirs[0]
        self._start = _now()

    def _time_other(self, engine: Engine) -> None:
        assert self.other is not None
        start = _now()
        self.other(self.length)
        settle(engine)
        self.theirs.append(_since(start))


def _now() -> Took:
    return Took(perf_counter(), process_time())


def _since(start: Took) -> Took:
    now = _now()
    return Took(now.time - start.time, now.cpu - start.cpu)


def settle(engine: Engine) -> None:
    """Wait for the device and for the other ranks."""
    if engine.device.type != "cpu":
        torch.accelerator.synchronize(engine.device)
    engine.distributed.barrier()


class Records(Hook):
    """Keeps the records of training."""

    def __init__(self) -> None:
        self.records: list[Mapping[str, Any]] = []

    def on_log(self, engine: Engine, record: Mapping[str, Any]) -> None:
        """Keep it."""
        if record["mode"] == "train":
            self.records.append(record)


class NoSyncs(Hook):
    """Lets CUDA raise at whatever makes the host wait for the device, from an iteration on, but when a record is made.

    Args:
        begin: completed iterations from which on it does.
        record_every: iterations between two records.
    """

    priority = 0  # before whoever makes the record

    def __init__(self, *, begin: int, record_every: int) -> None:
        self.begin, self.record_every = begin, record_every
        self.checked = 0
        """Iterations that went through with it."""

    def before_train_iter(self, engine: Engine, batch_idx: int, batch: Any) -> None:
        """On; it stays on while the next batch is fetched."""
        if engine.progress.iteration >= self.begin:
            torch.cuda.set_sync_debug_mode("error")

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """Off where a record follows, or the end."""
        progress = engine.progress
        if progress.iteration <= self.begin:
            return
        self.checked += 1
        if progress.iteration % self.record_every == 0 or progress.iteration >= engine.max_iters:
            torch.cuda.set_sync_debug_mode("default")

    def after_train(self, engine: Engine) -> None:
        """Off, whatever happened."""
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")
