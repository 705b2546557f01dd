"""IterTimerHook: how long iterations take, how much of it is waiting for data, and when training will be done."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any

from hydraloop.engine.hook import Hook, Priority
from hydraloop.engine.timing import Durations, Timing

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine


class IterTimerHook(Hook):
    """Measures each training iteration and the wait for its batch.

    `time` runs from the end of one iteration to the end of the next, `data_time` is its part up to before_train_iter:
    waiting for the loader, moving the batch, and what hooks behind this one did after the last iteration. Both go into
    `engine.messages` in seconds. An iteration after a validation or a checkpoint within its epoch is timed from
    before_train_iter and has no `data_time`, so neither counts what was done in between.

    Facts: `eta` (seconds of training left, at the mean of this process's iterations; validation is not in it; None
    before the first), `timing` (`summary()`). The clock is the host's: on an accelerator, which runs behind, single
    iterations say how long launching took, their mean how long the device took.

    Mount points: before_run, before_train_epoch, before_train_iter, after_train_iter, before_val,
    before_save_checkpoint. Priority NORMAL, MMEngine's. No host sync. No state: a resumed run measures its own
    machine. No options, as in MMEngine.
    """

    priority = Priority.NORMAL

    def __init__(self) -> None:
        self._iterations = Durations()
        self._waited = 0.0
        self._end = 0.0
        self._interrupted = False

    def before_run(self, engine: Engine) -> None:
        """Provide `eta` and `timing`."""
        engine.messages.provide("eta", lambda: self._eta(engine))
        engine.messages.provide("timing", self.summary)

    def before_train_epoch(self, engine: Engine) -> None:
        """Begin with the wait for the epoch's first batch, which includes starting the loader's workers."""
        self._end = perf_counter()
        self._interrupted = False

    def before_train_iter(self, engine: Engine, batch_idx: int, batch: Any) -> None:
        """The batch is there."""
        now = perf_counter()
        if self._interrupted:
            self._interrupted = False
            self._end = now
        else:
            waited = now - self._end
            self._waited += waited
            engine.messages.add("data_time", waited)

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """The iteration is done, and the next one begins."""
        now = perf_counter()
        taken = now - self._end
        self._end = now
        self._iterations.add(taken)
        engine.messages.add("time", taken)

    def before_val(self, engine: Engine) -> None:
        """Something else than an iteration follows."""
        self._interrupted = True

    def before_save_checkpoint(self, engine: Engine, checkpoint: dict[str, Any]) -> None:
        """Something else than an iteration follows."""
        self._interrupted = True

    def summary(self) -> Timing | None:
        """Statistics over the iterations of this process so far; None before the first."""
        taken = self._iterations
        if not taken.count:
            return None
        return Timing(
            iterations=taken.count,
            total=taken.total,
            mean=taken.mean,
            p50=taken.quantile(0.5),
            p90=taken.quantile(0.9),
            max=taken.max,
            data_share=self._waited / taken.total if taken.total else 0.0,
        )

    def _eta(self, engine: Engine) -> float | None:
        if not self._iterations.count:
            return None
        return max(engine.max_iters - engine.progress.iteration, 0) * self._iterations.mean
