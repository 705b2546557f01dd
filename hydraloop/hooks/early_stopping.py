"""EarlyStoppingHook: ends training when a metric has stopped improving."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook, Priority
from hydraloop.hooks.monitoring import RULES, check_metric, check_validated, higher_is_better
from hydraloop.schemas.option_checks import check_at_least, check_choice

log = logging.getLogger(__name__)


class EarlyStoppingHook(Hook):
    """Stops training when `monitor` has not improved in `patience` validations in a row.

    Training ends regularly, with the last checkpoint and the test. The log and `result.json` (status `stopped`) have
    the reason. A stopped run that is resumed ends at once, unless an option that stopped it has changed (`patience`).

    Priority LOWEST, MMEngine's: the other hooks see the validation first. No host sync: metrics are plain numbers and
    equal on all ranks, which stop together without communication. State: the last improvement and the last value, and
    the count. Options: `EarlyStoppingHookConf`.
    """

    priority = Priority.LOWEST
    runs_after = ("checkpoint",)  # its `save_best` sets the objective

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
        """Check the options.

        Raises:
            UserError: a number or the rule is out of range.
        """
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
        self.last: float | None = None
        """The value of the last validation; None before the first."""
        self.last_at = ""
        """When the last validation was: `epoch 7`, or `iteration 500` inside an epoch."""
        self.last_improvement: float | None = None
        """The value with which the next validation is compared; None before the first improvement."""
        self._higher = True
        """Whether high values are good."""
        self._training = False

    def before_run(self, engine: Engine) -> None:
        """Determine the metric and the rule."""
        name = engine.validations.objective[0] if self.monitor is None else self.monitor
        check_metric(name, engine, key=f"{self.key}.monitor")
        self._higher = higher_is_better(name, engine, rule=self.rule, key=self.key)
        self.monitor = name

    def before_train(self, engine: Engine) -> None:
        """Start to count validations. Stop a resumed run at once if its last validation still stops it."""
        check_validated(engine, key=self.key)
        self._training = True
        if self._reason_to_stop() is not None:
            log.warning("%s: this run was stopped; to continue training, change an option such as patience", self.key)
            self._stop_if_needed(engine)

    def after_val_epoch(self, engine: Engine, metrics: Mapping[str, float]) -> None:
        """Count the validation, and request a stop if an option says so. Only validations in training count.

        Raises:
            RuntimeError: the metric is missing, with `strict`.
        """
        value = self._value_in(engine.validations.comparable) if self._training else None
        if value is None:
            return
        progress = engine.progress
        self.last = value
        self.last_at = f"iteration {progress.iteration}" if progress.batch_in_epoch else f"epoch {progress.epoch}"
        if self._is_improvement(value):
            self.last_improvement = value
            self.wait_count = 0
        else:
            self.wait_count += 1
        self._stop_if_needed(engine)

    def after_train(self, engine: Engine) -> None:
        self._training = False

    def state_dict(self) -> dict[str, Any]:
        """Return the metric and its direction, the last value, the last improvement, and the count."""
        return {
            "monitor": self.monitor,
            "higher": self._higher,
            "last": self.last,
            "last_at": self.last_at,
            "last_improvement": self.last_improvement,
            "wait_count": self.wait_count,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue counting. Begin a new count if the run now has another metric or rule."""
        if (state["monitor"], state["higher"]) != (self.monitor, self._higher):
            log.warning("%s: this run monitored %s until now; the count starts again", self.key, state["monitor"])
            return
        self.last = state["last"]
        self.last_at = state["last_at"]
        self.last_improvement = state["last_improvement"]
        self.wait_count = state["wait_count"]

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

    def _stop_if_needed(self, engine: Engine) -> None:
        reason = self._reason_to_stop()
        if reason is not None:
            engine.request_stop(f"{self.name}: {self.monitor} {self.last:.6g} at {self.last_at} {reason}", agreed=True)

    def _reason_to_stop(self) -> str | None:
        """Return why training stops at the last validation; None if it continues."""
        if self.last is None:
            return None
        if self.check_finite and not math.isfinite(self.last):
            return "is not finite"
        if self.stopping_threshold is not None and self._score(self.last) > self._score(self.stopping_threshold):
            return f"is {'above' if self._higher else 'below'} the stopping_threshold {self.stopping_threshold:g}"
        if self.wait_count < max(self.patience, 1):
            return None
        on = "" if self.last_improvement is None else f" on {self.last_improvement:.6g}"
        by = f" by {self.min_delta:g}" if self.min_delta else ""
        return f"has not improved{on}{by} in {self.wait_count} validation{'s' if self.wait_count > 1 else ''}"

    def _is_improvement(self, value: float) -> bool:
        """Return whether the value is better than the last improvement, by at least `min_delta`.

        As in mmengine 0.10.7, with two differences: an equal value is not an improvement, also if `min_delta` is 0; and
        with `check_finite=false`, a NaN does not make every later value an improvement.
        """
        if math.isnan(value) or (math.isinf(value) and self.check_finite):
            return False
        if self.last_improvement is None:
            return True
        score = self._score(value)
        last = self._score(self.last_improvement)
        return score > last and score >= last + self.min_delta

    def _score(self, value: float) -> float:
        """Return a number whose high values are good."""
        return value if self._higher else -value
