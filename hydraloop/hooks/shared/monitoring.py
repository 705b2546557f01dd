"""Which metric to follow, and whether high or low values are good: for hooks with `monitor` or `save_best`."""

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
    """Reject a metric that no validation of this run reports.

    Raises:
        UserError: names similar metrics.
    """
    if name not in engine.metric_names:
        raise UserError(f"there is no metric {name!r}", key=key, remedy=suggestion(name, engine.metric_names))


def check_validated(engine: Engine, *, key: str) -> None:
    """Reject an option that depends on validation in a run without one.

    Raises:
        UserError: names `key`, which null switches off.
    """
    if engine.loaders.val is None or engine.settings.val_interval is None:
        raise UserError(
            "this needs a validation, and the run has none",
            key=key,
            remedy=f"Set data.val and engine.val_interval=1, or {key}=null.",
        )


def check_rule(rule: str | None) -> None:
    """Reject a rule other than `greater` and `less`.

    Raises:
        UserError: names both.
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
    """Return whether high values of the metric `name` are good.

    In this order: the rule; the user's key lists; what the metric declares (`higher_is_better`, as in torchmetrics);
    the default key lists, MMEngine's. A key matches a name that it equals, else one that contains it; case does not
    matter.

    Args:
        greater_keys: instead of `GREATER_KEYS`; None for those.
        less_keys: instead of `LESS_KEYS`; None for those.
        key: the hook's key in the config, for the error.

    Raises:
        UserError: none of these applies.
    """
    if rule is not None:
        return rule == "greater"
    found = by_keys(name, greater_keys or (), less_keys or ())
    if found is None:
        # None for the loss of an evaluation, which is not a metric; the default lists contain it.
        found = engine.task.higher_is_better(name)
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
    """Return whether `value` is strictly better. Any finite value is better than None; NaN and infinity never are."""
    if not math.isfinite(value):
        return False
    return than is None or (value > than if higher else value < than)
