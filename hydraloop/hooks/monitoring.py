"""Which metric to follow, and whether high or low values are good: for hooks with `monitor` or `save_best`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hydraloop.engine.engine import Engine
from hydraloop.errors import UserError, suggestion
from hydraloop.files.result import GREATER_KEYS, LESS_KEYS, by_keys

RULES = ("greater", "less")
"""Values of the option `rule`."""


def check_metric(name: str, engine: Engine, *, key: str) -> None:
    """Reject a metric that no validation of this run reports as a number."""
    names = engine.evaluator.metric_names
    if name in names:
        return
    remedy = suggestion(name, names)
    if not engine.evaluator.names_are_known:
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


def direction(
    name: str, engine: Engine, *, greater_keys: Sequence[str] | None = None, less_keys: Sequence[str] | None = None
) -> bool | None:
    """Return whether high values of the metric `name` are good; None if this is not known.

    In this order: the user's key lists; what the metric declares (`higher_is_better`, as in torchmetrics); the default
    key lists, MMEngine's. A key matches a name that it equals, else one that contains it; case does not matter.

    Args:
        greater_keys: replace `GREATER_KEYS`, unless None.
        less_keys: replace `LESS_KEYS`, unless None.
    """
    given = by_keys(name, greater_keys or (), less_keys or ())
    if given is not None:
        return given
    # None for the loss of an evaluation, which is not a metric; the default lists contain it.
    declared = engine.evaluator.higher_is_better(name)
    if declared is not None:
        return declared
    greater = GREATER_KEYS if greater_keys is None else greater_keys
    less = LESS_KEYS if less_keys is None else less_keys
    # Without the data set's name, which may contain a key: desktop/class_loss contains `top`.
    return by_keys(engine.evaluator.without_data_set(name), greater, less)


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
    """Return whether high values of the metric `name` are good: by the rule, else by `direction`.

    Args:
        key: the hook's key in the config, for the error.

    Raises:
        UserError: neither is known.
    """
    if rule is not None:
        return rule == "greater"
    higher = direction(name, engine, greater_keys=greater_keys, less_keys=less_keys)
    if higher is None:
        raise unknown_direction(name, key=f"{key}.rule", choices=RULES)
    return higher


def is_better(value: float, than: float | None, *, higher: bool) -> bool:
    """Return whether `value` is strictly better. Any finite value is better than None; NaN and infinity never are."""
    if not math.isfinite(value):
        return False
    return than is None or (value > than if higher else value < than)
