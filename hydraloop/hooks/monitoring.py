"""Which metric to follow, and whether high or low values are good: for hooks with `monitor` or `save_best`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import cycle
from typing import Any

from hydraloop.engine.engine import Engine
from hydraloop.errors import UserError, suggestion
from hydraloop.schemas.option_checks import check_choice

log = logging.getLogger(__name__)

RULES = ("greater", "less")
"""Values of the option `rule`."""


def check_metric(name: str, engine: Engine, *, key: str) -> None:
    """Reject a metric that no validation of this run reports as a number."""
    names = engine.validations.metric_names
    if name in names:
        return
    remedy = suggestion(name, names)
    if not engine.validations.names_are_known:
        remedy += " If the task returns it, set engine.sanity_val_steps=1, which finds all names."
    raise UserError(f"there is no metric {name!r}", key=key, remedy=remedy)


def is_validated(engine: Engine) -> bool:
    """Return whether the run has validations."""
    return engine.loaders.val is not None and engine.settings.val_interval is not None


def check_validated(engine: Engine, *, key: str, instead: str | None = None) -> None:
    """Reject an option that needs a validation in a run without one.

    Args:
        instead: what to do in a run without one; None: set `key` to null.
    """
    if not is_validated(engine):
        raise UserError(
            "this needs a validation, and the run has none",
            key=key,
            remedy=f"Set data.val and engine.val_interval=1, or {instead or f'set {key}=null'}.",
        )


def unknown_direction(name: str, *, key: str, choices: Sequence[str]) -> UserError:
    """Return the error for a metric without a known direction.

    Args:
        key: of the option that determines the direction.
        choices: its values.
    """
    return UserError(
        f"it is not known whether high or low values of {name!r} are good",
        key=key,
        remedy=f"Set {' or '.join(f'{key}={choice}' for choice in choices)}.",
    )


def higher_is_better(
    name: str,
    engine: Engine,
    *,
    rule: str | None = None,
    greater_keys: Sequence[str] | None = None,
    less_keys: Sequence[str] | None = None,
    key: str,
) -> bool:
    """Return whether high values of the metric `name` are good: by the rule, else by `Validations.direction`.

    Args:
        key: the hook's key in the config, for the error.

    Raises:
        UserError: neither is known.
    """
    if rule is not None:
        return rule == "greater"
    higher = engine.validations.direction(name, greater_keys, less_keys)
    if higher is None:
        raise unknown_direction(name, key=f"{key}.rule", choices=RULES)
    return higher


class MonitoredMetrics:
    """The metrics of `save_best`, and which of their values are better.

    Args:
        save_best: a metric, several, `auto` or true (`Validations.objective`), or None or false (no metric).
        rule: `greater` or `less`, or a list with one entry for each metric; None: as `Validations.direction` finds it.
        greater_keys: as in `Validations.direction`.
        less_keys: as in `Validations.direction`.

    Raises:
        UserError: a rule is unknown, or there is not one rule for each metric.
    """

    def __init__(
        self,
        save_best: str | bool | Sequence[str] | None,
        rule: str | Sequence[str | None] | None,
        greater_keys: Sequence[str] | None,
        less_keys: Sequence[str] | None,
    ) -> None:
        if isinstance(save_best, bool):  # MMClassification's spelling
            save_best = "auto" if save_best else None
        self._metrics: list[str] = [] if save_best is None else [str(metric) for metric in _as_list(save_best)]
        self._rules = _as_list(rule)
        self._greater_keys = greater_keys
        self._less_keys = less_keys
        for each in self._rules:
            check_choice(RULES, rule=each)
        if not isinstance(rule, str | None) and len(self._rules) not in (1, len(self._metrics)):
            raise UserError(
                f"{len(self._rules)} rules for {len(self._metrics)} metrics in save_best",
                key="rule",
                remedy="Set one rule for all, or a list with one rule for each.",
            )

    def directions(self, engine: Engine, *, key: str) -> dict[str, bool]:
        """Return {metric: whether its high values are good}, in the order of `save_best`.

        `auto` is never an error, because `hydraloop/project` selects it for every project.

        Args:
            key: the hook's key in the config, for errors.

        Raises:
            UserError: a named metric is unknown, or no rule applies to it.
        """
        metrics = self._metrics
        is_auto = metrics == ["auto"]
        if is_auto:
            metrics = [engine.validations.objective[0]] if is_validated(engine) else []
        higher: dict[str, bool] = {}
        for metric, rule in zip(metrics, cycle(self._rules), strict=False):
            try:
                check_metric(metric, engine, key=f"{key}.save_best")
                higher[metric] = higher_is_better(
                    metric,
                    engine,
                    rule=rule,
                    greater_keys=self._greater_keys,
                    less_keys=self._less_keys,
                    key=key,
                )
            except UserError as unknown:
                if not is_auto:
                    raise
                log.info("no best checkpoint is kept: %s", unknown)
        return higher


def _as_list(option: str | Sequence[Any] | None) -> list[Any]:
    """Return an option that is one value or a list of them as a list."""
    return list(option) if isinstance(option, Sequence) and not isinstance(option, str) else [option]
