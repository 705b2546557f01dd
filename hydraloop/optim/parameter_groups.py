"""Parameter groups of an optimizer: parameters with equal settings are in one group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from hydraloop.engine.parameter_patterns import Places, matched
from hydraloop.errors import UserError, suggestion


def grouped(
    chosen: Iterable[nn.Parameter], rules: Sequence[Any], scales: Mapping[nn.Parameter, float], places: Places, key: str
) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer; parameters with equal settings are in one group.

    Groups with the optimizer's own lr come first: records and schedules show the first group. Among these, a group
    without any settings is the first. `lr_scale` is among the settings.

    Args:
        chosen: the parameters of the optimizer, in the model's order.
        rules: mappings with `match` and settings. All that match apply, and a later one wins for each setting.
        scales: another factor of the lr, for some parameters.
        places: of the model's parameters.
        key: of the rules in the config, for errors.

    Raises:
        UserError: something is not a rule, or matches nothing.
    """
    settings: dict[nn.Parameter, dict[str, Any]] = {parameter: {} for parameter in chosen}
    within = {
        parameter: found for parameter, found in places.items() if parameter in settings or not parameter.requires_grad
    }
    for index, rule in enumerate(rules):
        where = f"{key}[{index}]"
        if not isinstance(rule, Mapping) or not isinstance(rule.get("match"), str) or len(rule) < 2:
            remedy = 'Write rules as {match: "@norm|@bias", weight_decay: 0}.'
            raise UserError("needs a pattern, match, and a value", key=where, remedy=remedy)
        values = {
            str(name): tuple(value) if isinstance(value, list) else value
            for name, value in rule.items()
            if name != "match"
        }
        for parameter in matched(rule["match"], within, f"{where}.match"):
            settings[parameter].update(values)
    groups: dict[tuple[Any, ...], dict[str, Any]] = {(): {"params": []}}
    for parameter, values in settings.items():
        scale = values.pop("lr_scale", 1.0) * scales.get(parameter, 1.0)
        if scale != 1.0:
            values["lr_scale"] = scale
        same = tuple(sorted(values.items()))
        groups.setdefault(same, {**values, "params": []})["params"].append(parameter)
    found = [group for group in groups.values() if group["params"]]
    return sorted(found, key=lambda group: "lr" in group or "lr_scale" in group)


def check_settings(rules: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any], kind: str, key: str) -> None:
    """Refuse settings that a parameter group of this optimizer does not have: torch would ignore them.

    Args:
        defaults: the values of the optimizer, by name.
    """
    known = [*defaults, "lr_scale", "name"]
    for index, rule in enumerate(rules):
        for name in rule.keys() - {"match"}:
            if name not in known:
                problem = f"the parameter groups of {kind} have no such value"
                raise UserError(problem, key=f"{key}[{index}].{name}", remedy=suggestion(str(name), known))
