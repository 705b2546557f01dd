"""A flag that any rank can set, and that all ranks receive without waiting for each other."""

from __future__ import annotations

from time import perf_counter

import torch

from hydraloop.engine.distributed.comm import Distributed, Pending


class BackgroundFlag:
    """Exchanges a flag between the ranks in the background: whether any rank has set it.

    It is sent every `agree_interval` iterations, or every 5 s if they take longer. It is received one interval later,
    when it has arrived, so neither host nor device waits for it. With the flag, each rank sends the interval that it
    proposes; the smallest one counts.
    """

    _SECONDS = 5.0
    """The longest time between two exchanges, unless an iteration takes longer."""

    def __init__(self, ranks: Distributed) -> None:
        self._ranks = ranks
        self._values = torch.zeros(2, dtype=torch.int32)
        """[whether the flag is set, minus the proposed interval]; the maximum over the ranks."""
        self._exchange: Pending | None = None
        self._interval = 1
        self._sent_at = 0
        self._sent_in = ""
        self._sent_time = 0.0

    def is_time(self, at: int, mode: str) -> bool:
        """Return whether to receive and send now; the same on every rank.

        Args:
            at: the iteration, or the batch of an evaluation.
            mode: of the engine, in which `at` counts up.
        """
        return self._is_restart(at, mode) or at >= self._sent_at + self._interval

    def _is_restart(self, at: int, mode: str) -> bool:
        return mode != self._sent_in or at < self._sent_at

    def receive(self) -> bool:
        """Finish the exchange; return whether any rank has set the flag."""
        if self._exchange is None:
            return False
        self._exchange.wait()
        self._exchange = None
        is_set, interval = self._values.tolist()
        self._interval = -interval
        return bool(is_set)

    def send(self, at: int, mode: str, *, is_set: bool) -> None:
        """Start the next exchange."""
        now = perf_counter()
        steps = at - self._sent_at
        if self._is_restart(at, mode):
            self._interval = 1  # until the time of an iteration or batch is known
            steps = 0
        in_time = self._SECONDS * steps / max(now - self._sent_time, 1e-9)
        proposed = max(1, int(min(self._ranks.agree_interval, in_time)))
        self._sent_at = at
        self._sent_in = mode
        self._sent_time = now
        self._values = torch.tensor([int(is_set), -proposed], dtype=torch.int32)
        self._exchange = self._ranks.start_max(self._values)
