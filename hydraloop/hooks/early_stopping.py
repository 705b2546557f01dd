"""EarlyStoppingHook: ends training when a metric has stopped improving."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook, Priority
from hydraloop.hooks.monitoring import RULES, check_metric, check_validated, higher_is_better, is_better
from hydraloop.schemas.option_checks import check_at_least, check_choice

log = logging.getLogger(__name__)


class EarlyStoppingHook(Hook):
    """Stops training when `monitor` has not improved in `patience` validations in a row.

    A validation is an improvement if it is better than the last improvement by at least `min_delta`. Any other
    validation increases a count, which an improvement resets to 0. Training also stops at a value that is not finite
    (`check_finite`), and when a value is better than `stopping_threshold`. It ends regularly, with the last checkpoint
    and the test. The log and `result.json` (status `stopped`) contain the reason: the metric, its value, and the best
    value with its epoch. The best value may be better than the last improvement by less than `min_delta`. A stopped run
    that is resumed ends at once, unless an option that stopped it has changed (such as `patience`). Validations outside
    of training do not count.

    Priority LOWEST, MMEngine's: the other hooks see the validation first. No host sync: metrics are plain numbers and
    equal on all ranks, so that all stop together without communication. State: the best value, its epoch, the last
    improvement, the count, and why and by which options it stopped. Options: `EarlyStoppingHookConf`. The rule is that
    of mmengine 0.10.7, with three differences: `min_delta` defaults to 0 instead of 0.1; an equal value is not an
    improvement, even if `min_delta` is 0; and with `check_finite=false` a NaN is a validation without improvement,
    while in mmengine any value after it is an improvement.

    Raises:
        UserError: a number or the rule is out of range; before the first iteration: no validation, or no such metric.
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
        check_choice(RULES, rule=rule)
        check_at_least(0, min_delta=min_delta, patience=patience)
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
        """The best value, also if it is no improvement because of `min_delta`; never NaN or infinite."""
        self.best_at = ""
        """When that was: `epoch 7`, or `iteration 500` inside an epoch."""
        self._last_improvement: float | None = None
        """The value that the next improvement is compared with."""
        self.stopped: str | None = None
        """Why training stopped; None if it did not."""
        self._stopped_by: dict[str, float | None] = {}
        """The options that stopped it."""
        self._higher = True
        self._training = False

    def before_run(self, engine: Engine) -> None:
        """Determine the metric and the rule."""
        name = engine.evaluator.metric_names[0] if self.monitor is None else self.monitor
        check_metric(name, engine, key=f"{self.key}.monitor")
        self._higher = higher_is_better(name, engine, rule=self.rule, key=self.key)
        self.monitor = name

    def before_train(self, engine: Engine) -> None:
        """Start to count validations; stop at once if the run was stopped with the same options."""
        check_validated(engine, key=self.key)
        self._training = True
        if self._stopped_by != self._options:
            self.stopped = None
        if self.stopped is not None:
            log.warning("%s: this run was stopped; to continue training, change an option such as patience", self.key)
            engine.request_stop(self.stopped, agreed=True)

    def after_val_epoch(self, engine: Engine, metrics: Mapping[str, float]) -> None:
        """Judge the validation, keep what later ones are compared with, and request a stop if an option says so.

        Raises:
            RuntimeError: the metric is missing, with `strict`.
        """
        value = self._value_in(engine.evaluator.comparable) if self._training else None
        if value is None:
            return
        improved = self._is_improvement(value)
        waited = 0 if improved else self.wait_count + 1
        reason = self._reason_to_stop(value, improved, waited)

        progress = engine.progress
        now = f"iteration {progress.iteration}" if progress.batch_in_epoch else f"epoch {progress.epoch}"
        self.wait_count = waited
        if improved:
            self._last_improvement = value
        if is_better(value, self.best, higher=self._higher):
            self.best, self.best_at = value, now
        if reason is not None:
            best = "no best value" if self.best is None else f"best {self.best:.6g} at {self.best_at}"
            self.stopped = f"{self.name}: {self.monitor} {value:.6g} at {now} {reason}; {best}"
            self._stopped_by = self._options
            engine.request_stop(self.stopped, agreed=True)

    def after_train(self, engine: Engine) -> None:
        self._training = False

    def state_dict(self) -> dict[str, Any]:
        """Return the metric and its direction, the best value, the last improvement, the count, and why it stopped."""
        return {
            "monitor": self.monitor,
            "higher": self._higher,
            "best": self.best,
            "best_at": self.best_at,
            "improved_to": self._last_improvement,
            "wait_count": self.wait_count,
            "stopped": self.stopped,
            "stopped_by": self._stopped_by,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue counting, or start again if the run now follows another metric."""
        if (state["monitor"], state["higher"]) != (self.monitor, self._higher):
            log.warning("%s: this run monitored %s until now; the count starts again", self.key, state["monitor"])
            return
        self.best, self.best_at, self.wait_count = state["best"], state["best_at"], state["wait_count"]
        self._last_improvement = state["improved_to"]
        self.stopped, self._stopped_by = state["stopped"], state["stopped_by"]

    def _value_in(self, metrics: Mapping[str, float]) -> float | None:
        """Return the value of the metric; None, with a warning, if the validation does not have it."""
        assert self.monitor is not None, "set in before_run"
        if self.monitor in metrics:
            return metrics[self.monitor]
        problem = f"the validation has no {self.monitor!r}, only: {', '.join(metrics) or 'nothing'}"
        if self.strict:
            raise RuntimeError(f"{self.key}: {problem} ({self.key}.strict=true)")
        log.warning("%s: %s; it does not count", self.key, problem)
        return None

    def _reason_to_stop(self, value: float, improved: bool, waited: int) -> str | None:
        """Return why training stops at this value; None if it continues.

        Args:
            value: of the metric in this validation.
            improved: whether it is an improvement.
            waited: validations without an improvement in a row, this one included.
        """
        if self.check_finite and not math.isfinite(value):
            return "is not finite"
        if self.stopping_threshold is not None and self._score(value) > self._score(self.stopping_threshold):
            return f"is {'above' if self._higher else 'below'} the stopping_threshold {self.stopping_threshold:g}"
        if improved or waited < self.patience:
            return None
        by = f" by {self.min_delta:g}" if self.min_delta else ""
        return f"has not improved{by} in {waited} validation{'s' if waited > 1 else ''}"

    def _is_improvement(self, value: float) -> bool:
        """Return whether the value is better than the last improvement, by at least `min_delta`."""
        if math.isnan(value) or (math.isinf(value) and self.check_finite):
            return False
        if self._last_improvement is None:
            return True
        score, last = self._score(value), self._score(self._last_improvement)
        return score > last and score >= last + self.min_delta

    def _score(self, value: float) -> float:
        """Return a number whose high values are good."""
        return value if self._higher else -value

    @property
    def _options(self) -> dict[str, float | None]:
        """The options that decide when training stops, besides the metric."""
        names = ("min_delta", "patience", "check_finite", "stopping_threshold")
        return {name: getattr(self, name) for name in names}
