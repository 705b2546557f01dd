"""Hooks with which benchmarks measure the engine's own loop."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook


class Interleaved(Hook):
    """Times rounds of the engine's training loop and, while that loop is paused, rounds of another function.

    A round of the loop is `length` iterations with fetching their batches and all other hooks. It lasts from the hooks
    before an iteration to the hooks before the one `length` later. Before and after each round, ranks wait for each
    other and for their devices. The order of the two alternates (A B, B A, A B, …). The first round of each is a
    warm-up and not counted. The loop needs `length * (rounds + 1) + 1` iterations.

    Args:
        length: iterations of a round.
        rounds: number of rounds that are counted.
    """

    priority = 0  # first, so that the other hooks are part of the round
    collective = True

    def __init__(self, *, length: int, rounds: int) -> None:
        self.length, self.rounds = length, rounds
        self.other: Callable[[int], None] | None = None
        """Runs a number of iterations of the other function."""
        self.ours: list[float] = []
        """Seconds of the loop's rounds, without the warm-up."""
        self.theirs: list[float] = []
        """Seconds of the other function's rounds, without the warm-up."""
        self._start = 0.0

    def before_train_iter(self, engine: Engine, batch_idx: int, batch: Any) -> None:
        """Between two rounds: stop the clock, run the other function, start the next round."""
        begins, inside = divmod(engine.progress.iteration, self.length)
        if inside or begins > self.rounds + 1:
            return
        settle(engine)
        if begins:
            self.ours.append(perf_counter() - self._start)
        if begins % 2:  # after an even round of the loop, which comes first, and before an odd one, which comes second
            self._time_other(engine)
            if begins <= self.rounds:
                self._time_other(engine)
        if begins == self.rounds + 1:
            del self.ours[0], self.theirs[0]
        self._start = perf_counter()

    def _time_other(self, engine: Engine) -> None:
        assert self.other is not None
        start = perf_counter()
        self.other(self.length)
        settle(engine)
        self.theirs.append(perf_counter() - start)


def settle(engine: Engine) -> None:
    """Wait for the device and for the other ranks."""
    if engine.device.type != "cpu":
        torch.accelerator.synchronize(engine.device)
    engine.distributed.barrier()
