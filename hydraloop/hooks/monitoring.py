"""Which metric to follow, and whether high or low values are good: for hooks with `monitor` or `save_best`."""

from __future__ import annotations

from collections.abc import Sequence

from hydraloop.engine.engine import Engine
from hydraloop.errors import UserError, suggestion

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
    """Return whether high values of the metric `name` are good: by the rule, else by `Evaluator.direction`.

    Args:
        key: the hook's key in the config, for the error.

    Raises:
        UserError: neither is known.
    """
    if rule is not None:
        return rule == "greater"
    higher = engine.evaluator.direction(name, greater_keys, less_keys)
    if higher is None:
        raise unknown_direction(name, key=f"{key}.rule", choices=RULES)
    return higher
