"""IterTimerHook: measures how long iterations take and how long they wait for data, and estimates the time left."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from time import perf_counter
from typing import Any

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook

_MOST_FOR_ETA = 500
"""Maximum number of iterations that the eta averages: enough to contain many records, whose host sync takes time."""
_KEPT = 100_000
"""Latest durations that are kept for quantiles, in 3 MB."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Statistics of the iterations of this process; times in seconds."""

    iterations: int
    total: float
    mean: float
    p50: float
    """The median of the latest 100,000 iterations."""
    p90: float
    """90 % of the latest 100,000 iterations took no longer."""
    max: float
    data_share: float
    """Share of `total` (0 .. 1) spent in the loader and in copying batches to the device."""


class IterTimerHook(Hook):
    """Measures each training iteration and the wait for its batch.

    Adds two scalars to `engine.messages`, in seconds. `data_time` is the wait for the loader, plus the host's time for
    the copy of the batch to the device. With a copy stream, the host only starts the copy, and loads one batch ahead.
    `time` is the whole iteration with its hooks, from the end of the previous iteration to the end of this one. The
    first iteration of an epoch, and the first after a validation or a checkpoint, is timed from the request for its
    batch, so that `time` does not contain the work in between. (In MMEngine, `data_time` also contains the time of
    hooks that run after an iteration.)

    Facts: `eta` (seconds of training left; None before the first iteration), `timing` (`summary()`). `eta` uses the
    mean of the latest half of this process's iterations, at most the latest 500. So it soon forgets compilation in the
    first iterations, and adapts to a change of speed. For validations and checkpoints, it adds their share until now.
    (MMEngine uses the mean of all iterations, without validations.)

    The clock is the host's. An accelerator runs asynchronously, so the time of a single iteration shows how long it
    took to launch; only the mean shows how long the device took.

    Priority NORMAL, as in MMEngine. No host sync. No state: a resumed run measures its own machine. No options, as in
    MMEngine.
    """

    def __init__(self) -> None:
        self._count, self._total, self._max = 0, 0.0, 0.0
        self._latest: deque[float] = deque(maxlen=_KEPT)
        self._recent: deque[float] = deque(maxlen=2 * _MOST_FOR_ETA)
        self._waited = self._end = self._between = 0.0
        self._interrupted = True

    def before_run(self, engine: Engine) -> None:
        """Provide `eta` and `timing`."""
        engine.messages.provide("eta", lambda: self._eta(engine))
        engine.messages.provide("timing", self.summary)

    def before_train_epoch(self, engine: Engine) -> None:
        self._interrupted = True

    def before_val(self, engine: Engine) -> None:
        self._interrupted = True

    def before_save_checkpoint(self, engine: Engine, checkpoint: dict[str, Any]) -> None:
        self._interrupted = True

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """Measure the iteration that ends here."""
        now, waited = perf_counter(), engine.batches.waited
        if self._interrupted:
            self._between += engine.batches.asked_at - (self._end or engine.batches.asked_at)
            self._end = engine.batches.asked_at
        taken = now - self._end
        self._interrupted, self._end = False, now
        self._waited += waited
        self._count, self._total, self._max = self._count + 1, self._total + taken, max(self._max, taken)
        self._latest.append(taken)
        self._recent.append(taken)
        engine.messages.add("data_time", waited)
        engine.messages.add("time", taken)

    def summary(self) -> Timing | None:
        """Return statistics over all iterations of this process; None before the first."""
        if not self._count:
            return None
        latest = sorted(self._latest)
        p50, p90 = (latest[math.ceil(share * len(latest)) - 1] for share in (0.5, 0.9))
        return Timing(
            iterations=self._count,
            total=self._total,
            mean=self._total / self._count,
            p50=p50,
            p90=p90,
            max=self._max,
            data_share=self._waited / self._total if self._total else 0.0,
        )

    def _eta(self, engine: Engine) -> float | None:
        if not self._recent:
            return None
        earlier = len(self._recent) // 2
        mean = sum(islice(self._recent, earlier, None)) / (len(self._recent) - earlier)
        return max(engine.max_iters - engine.progress.iteration, 0) * (mean + self._between / self._count)
