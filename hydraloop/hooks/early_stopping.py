"""EarlyStoppingHook: ends training once a metric has stopped getting better."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hydraloop.engine.hook import Hook, Priority
from hydraloop.errors import UserError
from hydraloop.hooks.shared.monitoring import check_metric, check_rule, higher_is_better, is_better

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine

log = logging.getLogger(__name__)


class EarlyStoppingHook(Hook):
    """Stops training when `monitor` has not improved in `patience` validations in a row.

    A validation is an improvement if it is better than the last improvement, by at least `min_delta`. Every other
    validation adds one to a count, which an improvement sets back to 0. Training also stops at a value that is not
    finite (`check_finite`), and as soon as one is beyond `stopping_threshold`. It stops in order: with the last
    checkpoint and the test. The reason is in the log and in `result.json` (status `stopped`). It has the metric, its
    value, and the best value seen with its epoch, which may be better than the last improvement by less than
    `min_delta`. A stopped run that is resumed has nothing left to do, unless an option that stops it has changed
    (`patience`, say): then it trains on.

    Mount points: before_run (checks the metric), before_train, after_val_epoch, after_train: a validation outside of
    training does not count, and nothing has to be validated where nothing is trained. Priority LOWEST, MMEngine's: the
    others see the validation first. No host sync: the metrics are plain numbers, and the same on all ranks, so that all
    stop together without asking each other. State: the best value, its epoch, the last improvement, the count, why it
    stopped and by which options. The rule is that of mmengine 0.10.7 (`EarlyStoppingHook`), with three differences. The
    default of `min_delta` is 0, not 0.1. An equal value is not an improvement, also if `min_delta` is 0. With
    `check_finite=false`, a NaN is a validation without an improvement; in mmengine any value after it is an
    improvement.

    Args:
        monitor: the metric; None: the task's first, as with `save_best=auto`.
        rule: `greater` or `less` values are better; None: derived, see `monitoring.py`.
        min_delta: the least improvement that counts, in the metric's unit, 0 or more.
        patience: validations in a row without an improvement after which training stops, 0 or more; 0 is as 1.
        strict: end the run with an error where a validation comes without the metric, which a task of one's own may
            do; False: warn and go on.
        check_finite: stop at a value that is NaN or infinite.
        stopping_threshold: stop at a value beyond this one; None: no such value.

    Raises:
        UserError: a number or the rule is out of range; before the first iteration: no validation, no such metric.
    """

    priority = Priority.LOWEST

    def __init__(
        self,
        *,
        monitor: str | None = None,
        rule: str | None = None,
        min_delta: float = 0.0,
        patience: int = 5,
        strict: bool = False,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
    ) -> None:
        check_rule(rule)
        for key, number in (("min_delta", min_delta), ("patience", patience)):
            if not number >= 0:
                raise UserError(f"{number} is below 0", key=key, remedy="Use 0 or more.")
        if not isinstance(patience, int):
            raise UserError(f"{patience!r} is not a whole number", key="patience", remedy="It counts validations.")
        if stopping_threshold is not None and math.isnan(stopping_threshold):
            raise UserError("no value is beyond NaN", key="stopping_threshold", remedy="Use null for no threshold.")
        self.monitor = monitor
        self.rule = rule
        self.min_delta = min_delta
        self.patience = patience
        self.strict = strict
        self.check_finite = check_finite
        self.stopping_threshold = stopping_threshold
        self.wait_count = 0
        """Validations in a row without an improvement."""
        self.best: float | None = None
        """The best value so far, also if it is better by less than `min_delta`; never NaN or infinite."""
        self.best_at = ""
        """When that was: `epoch 7`, or `iteration 500` within an epoch."""
        self._improved_to: float | None = None  # the value of the last improvement
        self.stopped: str | None = None
        """Why it has stopped training; None where it has not."""
        self._stopped_by: dict[str, float | None] = {}  # the options that did
        self._higher = True
        self._training = False

    def before_run(self, engine: Engine) -> None:
        """Settle the metric and the rule.

        Raises:
            UserError: there is no such metric, or nothing says what is better.
        """
        name = engine.metric_names[0] if self.monitor is None else self.monitor
        check_metric(name, engine, key=f"{self.key}.monitor")
        self._higher = higher_is_better(name, engine, rule=self.rule, key=self.key)
        self.monitor = name

    def before_train(self, engine: Engine) -> None:
        """From here on validations count; a run that had been stopped by the same options stops at once.

        Raises:
            UserError: nothing is validated.
        """
        _check_validated(engine, self.key)
        self._training = True
        if self._stopped_by != self._options:
            self.stopped = None
        if self.stopped is not None:
            log.warning("%s: this run had been stopped; to train on, raise patience, say", self.key)
            engine.request_stop(self.stopped, agreed=True)

    def after_val_epoch(self, engine: Engine, metrics: Mapping[str, float]) -> None:
        """Take the validation in, and ask for the end where it is time.

        Raises:
            RuntimeError: the metric is missing, with `strict`.
        """
        if not self._training:
            return
        assert self.monitor is not None, "settled in before_run"
        if self.monitor not in metrics:
            problem = f"the validation has no {self.monitor!r}, only: {', '.join(metrics) or 'nothing'}"
            if self.strict:
                raise RuntimeError(f"{self.key}: {problem} ({self.key}.strict=true)")
            log.warning("%s: %s; it is left out", self.key, problem)
            return
        value = metrics[self.monitor]
        progress = engine.progress
        now = f"iteration {progress.iteration}" if progress.batch_in_epoch else f"epoch {progress.epoch}"
        why = self._take(value, now)
        if why is not None:
            best = "no best value" if self.best is None else f"best {self.best:.6g} at {self.best_at}"
            self.stopped = f"{self.name}: {self.monitor} {value:.6g} at {now} {why}; {best}"
            self._stopped_by = self._options
            engine.request_stop(self.stopped, agreed=True)

    def after_train(self, engine: Engine) -> None:
        """No validation counts any more."""
        self._training = False

    def state_dict(self) -> dict[str, Any]:
        """The metric and its direction, the best value, the last improvement, the count, and why it has stopped."""
        return {
            "monitor": self.monitor,
            "higher": self._higher,
            "best": self.best,
            "best_at": self.best_at,
            "improved_to": self._improved_to,
            "wait_count": self.wait_count,
            "stopped": self.stopped,
            "stopped_by": self._stopped_by,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting; anew where the run now follows another metric."""
        if (state["monitor"], state["higher"]) != (self.monitor, self._higher):
            log.warning("%s: this run followed %s until now; counting begins anew", self.key, state["monitor"])
            return
        self.best, self.best_at, self.wait_count = state["best"], state["best_at"], state["wait_count"]
        self._improved_to = state.get("improved_to", self.best)  # older checkpoints have it as the best
        self.stopped, self._stopped_by = state["stopped"], state["stopped_by"]

    def _take(self, value: float, now: str) -> str | None:
        """Take the value of a validation in. Returns why training stops; None if it continues."""
        threshold = self.stopping_threshold
        if is_better(value, self.best, higher=self._higher):
            self.best, self.best_at = value, now
        if self.check_finite and not math.isfinite(value):
            return "is not finite"
        if threshold is not None and self._beyond(value, threshold):
            return f"is {'above' if self._higher else 'below'} the stopping_threshold {threshold:g}"
        if self._improves(value):
            self._improved_to, self.wait_count = value, 0
            return None
        self.wait_count += 1
        if self.wait_count < self.patience:
            return None
        by = f" by {self.min_delta:g}" if self.min_delta else ""
        return f"has not improved{by} in {self.wait_count} validation{'s' if self.wait_count > 1 else ''}"

    def _improves(self, value: float) -> bool:
        last, delta = self._improved_to, self.min_delta if self._higher else -self.min_delta
        if last is None:
            return not math.isnan(value)
        return self._beyond(value, last) and not self._beyond(last + delta, value)

    @property
    def _options(self) -> dict[str, float | None]:
        """What decides, beside the metric, when training stops."""
        names = ("min_delta", "patience", "check_finite", "stopping_threshold")
        return {name: getattr(self, name) for name in names}

    def _beyond(self, value: float, other: float) -> bool:
        return value > other if self._higher else value < other


def _check_validated(engine: Engine, key: str) -> None:
    """Refuse a run whose metrics nobody computes."""
    if engine.loaders.val is None:
        raise UserError("there is no validation data to stop by", key=key, remedy="Give data.val, or leave it out.")
    if engine.settings.val_interval is None:
        raise UserError(
            "nothing is validated, so there is nothing to stop by",
            key=key,
            remedy="Set engine.val_interval=1, or leave it out.",
        )
