"""Validations: the metrics of the last one, the best one, and how two of them are compared."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydraloop.engine.loaders import Loaders, sets_of
from hydraloop.engine.run_parts import Run
from hydraloop.files.result import GREATER_KEYS, LESS_KEYS, Best, by_keys, is_better

log = logging.getLogger(__name__)


class Validations:
    """The metrics of the last validation, and the best validation.

    Args:
        run: the parts of the run.
        loaders: their data sets are in the names of metrics.
    """

    def __init__(self, run: Run, loaders: Loaders) -> None:
        self._task = run.task
        self._settings = run.settings
        self._ranks = run.ranks
        self._progress = run.progress
        self._data_sets = tuple(sets_of(loaders.test if loaders.val is None else loaders.val)) or ("",)
        self._objective: tuple[str, bool] | None = None
        self._has_warned = False
        self.metrics: dict[str, float] = {}
        """The metrics of the last validation by name; empty before the first."""
        self.best: Best | None = None
        """The best validation in training, also before a resume.

        None before the first, and if it is not known which values of the objective are good."""
        self.metric_names: tuple[str, ...] = tuple(
            f"{name}/{metric}".lstrip("/") for name in self._data_sets for metric in run.task.metric_names
        )
        """Names of the validation metrics. Before `before_run`: the names that the task declares. After it: the names
        that the sanity step has seen."""
        self.names_are_known = False
        """Whether the sanity step has seen the names."""

    def add(self, metrics: dict[str, float], *, in_training: bool) -> None:
        """Add a validation that has just completed; called on every rank.

        Args:
            metrics: by name, equal on all ranks.
            in_training: whether it may be the best validation.
        """
        self.metrics = metrics
        self._warn_of_nan()
        name, higher = self.objective
        if not in_training or higher is None or name not in metrics:
            return
        best = None if self.best is None else self.best.value
        if is_better(self.comparable[name], best, higher=higher):
            self.best = Best(name, metrics[name], self._progress.iteration)

    @property
    def objective(self) -> tuple[str, bool | None]:
        """The metric by which validations are compared, and whether its high values are good; None: not known.

        It is the first metric of `save_best`, otherwise the first one of `sweep.objectives`, otherwise of the task.
        """
        if self._objective is not None:
            return self._objective
        searched = (name for name in self._settings.objectives if name in self.metric_names)
        name = next(searched, next(iter(self.metric_names), "loss"))
        return name, self.direction(name)

    def set_objective(self, metric: str, *, higher: bool) -> None:
        """Compare validations by this metric. Called in before_run."""
        self._objective = (metric, higher)

    def set_best_checkpoint(self, iteration: int, checkpoint: Path) -> None:
        """Report the file of the best validation at an iteration. A file of another validation is ignored."""
        if self.best is not None and self.best.iteration == iteration:
            self.best = replace(self.best, checkpoint=str(checkpoint))

    @property
    def best_checkpoint(self) -> Path | None:
        """The checkpoint of the best validation. The test uses it. None: no such checkpoint was kept."""
        return None if self.best is None or self.best.checkpoint is None else Path(self.best.checkpoint)

    def state_dict(self) -> dict[str, Any]:
        """Return the metrics of the last validation, and the best validation without its file, which a hook saves."""
        best = None if self.best is None else (*self.objective, self.best.value, self.best.iteration)
        return {"metrics": dict(self.metrics), "best": best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with these validations. Without the best one, if the run has another objective now."""
        self.metrics = dict(state.get("metrics", {}))
        self.best = None
        if best := state.get("best"):
            metric, higher, value, iteration = best
            if (metric, higher) == self.objective:
                self.best = Best(metric, value, iteration)
            else:
                text = "the objective was %s and is %s now: the best validation is one of those that follow"
                log.info(text, metric, self.objective[0])

    def direction(
        self, metric: str, greater_keys: Sequence[str] | None = None, less_keys: Sequence[str] | None = None
    ) -> bool | None:
        """Return whether high values of a metric are good; None if this is not known.

        In this order: the user's key lists; `sweep.objectives`; what the metric declares (`higher_is_better`, as in
        torchmetrics); the default key lists, MMEngine's. A key matches a name that it equals, else one that contains
        it; case does not matter.

        Args:
            metric: its name.
            greater_keys: replace `GREATER_KEYS`, unless None.
            less_keys: replace `LESS_KEYS`, unless None.
        """
        given = by_keys(metric, greater_keys or (), less_keys or ())
        if given is not None:
            return given
        if metric in self._settings.objectives:
            return self._settings.objectives[metric]
        # Without the data set's name, which may contain a key: desktop/class_loss contains `top`.
        name = self.without_data_set(metric)
        # None for the loss of an evaluation, which is not a metric; the default lists contain it.
        declared: bool | None = self._task.higher_is_better(name)
        if declared is not None:
            return declared
        greater = GREATER_KEYS if greater_keys is None else greater_keys
        less = LESS_KEYS if less_keys is None else less_keys
        return by_keys(name, greater, less)

    @property
    def comparable(self) -> dict[str, float]:
        """The metrics of the last validation where validations are compared.

        If the loss of a data set is NaN, its other metrics are NaN, too: they are of outputs that are NaN, such as the
        share of class 0. With `allow_nan`, all metrics count as they are.
        """
        if self._settings.allow_nan:
            return self.metrics
        return {name: math.nan if self._has_nan_loss(name) else value for name, value in self.metrics.items()}

    def _has_nan_loss(self, metric: str) -> bool:
        data_set = metric.removesuffix(self.without_data_set(metric))
        return math.isnan(self.metrics.get(f"{data_set}loss", 0.0))

    def without_data_set(self, metric: str) -> str:
        """Return the name of one of `metric_names` without the data set in front of it."""
        name, _, rest = metric.partition("/")
        return rest if name in self._data_sets and rest else metric

    def _warn_of_nan(self) -> None:
        """Warn once if metrics that are not NaN count as NaN."""
        names = [name for name, value in self.comparable.items() if math.isnan(value) > math.isnan(self.metrics[name])]
        if names and self._ranks.is_main and not self._has_warned:
            self._has_warned = True
            log.warning(
                "the validation loss is nan at iteration %d, so %s counts as nan, too, where validations are compared "
                "(best checkpoints, early stopping, schedules, objective); engine.allow_nan=true lets it count",
                self._progress.iteration, ", ".join(names),
            )  # fmt: skip
