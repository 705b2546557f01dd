"""Which metric to follow, and whether its high or its low values are good: for hooks with `monitor` or `save_best`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hydraloop.errors import UserError, suggestion
from hydraloop.run.metric_rules import GREATER_KEYS, LESS_KEYS, by_keys

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine

RULES: tuple[str, ...] = ("greater", "less")


def check_metric(name: str, engine: Engine, *, key: str) -> None:
    """Refuse a metric that no validation of this run reports.

    Raises:
        UserError: names the close ones.
    """
    if name not in engine.metric_names:
        raise UserError(f"there is no metric {name!r}", key=key, remedy=suggestion(name, engine.metric_names))


def check_rule(rule: str | None) -> None:
    """Refuse a rule that is none.

    Raises:
        UserError: names the two.
    """
    if rule is not None and rule not in RULES:
        raise UserError(f"there is no rule {rule!r}", key="rule", remedy="Use greater, less, or null to derive it.")


def higher_is_better(
    name: str,
    engine: Engine,
    *,
    rule: str | None = None,
    greater_keys: Sequence[str] | None = None,
    less_keys: Sequence[str] | None = None,
    key: str,
) -> bool:
    """Whether high values of the metric `name` are good.

    In this order: the rule; the user's own key lists; what the metric itself declares (`higher_is_better`, as those of
    torchmetrics do); the default key lists. A key fits a name it equals, else one it is a part of; upper and lower case
    count as the same. mmengine, whose lists these are, knows no declarations; a metric that makes one is not guessed.

    Args:
        greater_keys: in place of `GREATER_KEYS`; None takes those.
        less_keys: in place of `LESS_KEYS`; None takes those.
        key: the hook's key in the config, for the error.

    Raises:
        UserError: nothing says it.
    """
    if rule is not None:
        return rule == "greater"
    # The loss of an evaluation is the task's own: no metric object stands behind it, and the lists know it.
    declare = getattr(engine.task, "higher_is_better", None)
    declared = None if declare is None else declare(name)
    found = by_keys(name, greater_keys or (), less_keys or ())
    if found is None:
        found = declared
    if found is None:
        greater = GREATER_KEYS if greater_keys is None else greater_keys
        found = by_keys(name, greater, LESS_KEYS if less_keys is None else less_keys)
    if found is None:
        raise UserError(
            f"nothing says whether high or low values of {name!r} are good",
            key=f"{key}.rule",
            remedy=f"Set {key}.rule=greater or {key}.rule=less.",
        )
    return bool(found)


def is_better(value: float, than: float | None, *, higher: bool) -> bool:
    """Whether `value` is strictly better; any finite value is better than None, NaN and infinity never are."""
    if not math.isfinite(value):
        return False
    return than is None or (value > than if higher else value < than)
