"""Parameter groups: parameters that a pattern matches, those with equal settings, and the lr that decays by layer."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import nn

from hydraloop.engine.checkpoint.names import matching
from hydraloop.errors import UserError, any_of, suggestion

Places: TypeAlias = dict[nn.Parameter, list[tuple[str, nn.Module]]]
"""Each parameter with its names in the model, and the module that has it by this name. A tied one has several."""

# _NormBase: BatchNorm and InstanceNorm of any dimension.
_MULTI_DIM_NORMS = (nn.LayerNorm, nn.RMSNorm)  # their weights may have several dimensions
_HIGHEST = {"lr": math.inf, "lr_scale": math.inf, "weight_decay": math.inf, "momentum": 1.0, "betas": 1.0}
"""Values that are at least 0, and the highest one."""
_KINDS = ("@norm", "@bias", "@embedding", "@matrix")


def places_of(model: nn.Module) -> Places:
    """Return all parameters of a model in its order, with their places."""
    found: Places = {parameter: [] for parameter in model.parameters()}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            found[parameter].append((f"{prefix}.{name}".lstrip("."), module))
    return found


def matched(pattern: str, places: Places, key: str) -> set[nn.Parameter]:
    """Return the trained parameters that a pattern matches.

    Args:
        pattern: parts separated by `|`, each a name, a glob or a kind; after `!`, a part excludes. `re:` begins a
            regular expression, which continues to the end of the pattern.
        places: of the parameters to choose from.
        key: the option that has the pattern, for errors.

    Raises:
        UserError: an unknown kind; or a name, or the whole pattern, matches no trained parameter.
    """
    names = {name: parameter for parameter, found in places.items() for name, _ in found}
    head, colon, expression = pattern.partition("re:")
    parts = head.split("|")
    parts[-1] += colon + expression
    found: set[nn.Parameter] = set() if any(not part.strip().startswith("!") for part in parts) else set(places)
    excluded: set[nn.Parameter] = set()
    for part in map(str.strip, parts):
        side = excluded if part.startswith("!") else found
        side |= _part(part.removeprefix("!"), places, names, key)
    trained = {parameter for parameter in found - excluded if parameter.requires_grad}
    if not trained:
        problem = f"{pattern!r} matches {'only frozen parameters' if found - excluded else 'no parameter'}"
        raise UserError(problem, key=key, remedy="Remove it, or match other parameters.")
    return trained


def _part(part: str, places: Places, names: Mapping[str, nn.Parameter], key: str) -> set[nn.Parameter]:
    if not part.startswith("@"):
        return {names[name] for name in matching([part], names, key)}
    if part not in _KINDS:
        remedy = f"Did you mean {any_of(_KINDS)}?"
        raise UserError(f"{part!r} is not a kind of parameters", key=key, remedy=remedy)
    return {parameter for parameter, found in places.items() if _is(part, parameter, found)}


def _is(kind: str, parameter: nn.Parameter, places: Sequence[tuple[str, nn.Module]]) -> bool:
    """Return whether a parameter is of a kind by one of its places: the class of its module, or its own name."""
    if kind == "@matrix":
        large = parameter.ndim == 2 and min(parameter.shape) > 1  # not the magnitudes of weight_norm
        return large and not _is("@embedding", parameter, places) and not _is("@bias", parameter, places)
    for name, module in places:
        last = name.rpartition(".")[2]
        classes = [cls.__name__.lower() for cls in type(module).__mro__]
        is_bias = "bias" in last.split("_")  # bias, in_proj_bias, bias_ih_l0, relative_position_bias_table
        embeds = any("embed" in cls for cls in classes) or "embed" in last or last.endswith("_token")
        has_matrix = any(other.ndim > 1 for other in module.parameters(recurse=False))  # NormalizedLinear
        is_norm = isinstance(module, _MULTI_DIM_NORMS) or (any("norm" in cls for cls in classes) and not has_matrix)
        if {"@norm": is_norm, "@bias": is_bias, "@embedding": embeds and not is_bias}[kind]:
            return True
    return False


def grouped(
    chosen: Iterable[nn.Parameter], rules: Sequence[Any], scales: Mapping[nn.Parameter, float], places: Places, key: str
) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer; parameters with equal settings are in one group.

    The first group has no settings, unless all parameters have some. `lr_scale` is among the settings.

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
            str(name): _value(value, str(name), f"{where}.{name}") for name, value in rule.items() if name != "match"
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
    return [group for group in groups.values() if group["params"]]


def check_settings(rules: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any], kind: str, key: str) -> None:
    """Refuse settings that a parameter group of this optimizer does not have: torch would ignore them.

    Args:
        defaults: the values of the optimizer, by name.
    """
    known = [*defaults, "lr_scale", "name"]
    for index, rule in enumerate(rules):
        for name in rule.keys() - {"match"}:
            where = f"{key}[{index}].{name}"
            if name not in known:
                problem = f"the parameter groups of {kind} have no such value"
                raise UserError(problem, key=where, remedy=suggestion(str(name), known))
            default = defaults.get(name, 0)
            if name != "name" and default is not None and _form(rule[name]) != (form := _form(default)):
                raise UserError(f"{rule[name]!r} is not {form}", key=where, remedy="Write it as in the optimizer.")


def _form(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    return f"{len(value)} numbers" if isinstance(value, list | tuple) else "a number"


def _value(value: Any, name: str, key: str) -> Any:
    """Return the value of a setting: a list as a tuple. torch checks only those of the whole optimizer."""
    if name == "name":
        return str(value)
    found = tuple(value) if isinstance(value, list) and name not in ("lr", "lr_scale", "weight_decay") else value
    for item in found if isinstance(found, tuple) else [found]:
        if item is None and isinstance(found, tuple):  # as in Adafactor's eps
            continue
        if not isinstance(item, int | float):
            raise UserError(f"{item!r} is not a number", key=key, remedy="Give the group a number, or remove this.")
        if name in _HIGHEST and not 0 <= item <= _HIGHEST[name]:
            raise UserError(f"cannot be {item!r}", key=key, remedy="Give the group a value that the optimizer takes.")
    return found


def lr_scales(
    model: nn.Module, decay: float, layers_of: Callable[[nn.Module], Any] | None, key: str
) -> dict[Any, float]:
    """Return the factor of each parameter's lr: 1 after the last layer, times `decay` for each layer before it.

    Parameters before the first layer (embeddings) are a layer, and those after the last one (the head), too.

    Args:
        model: with layers.
        decay: above 0, up to 1.
        layers_of: returns the model's layers from input to output; None: those of a model of timm or transformers.
        key: of the optimizer in the config, for errors.

    Raises:
        UserError: the model does not list its layers.

    Source: K. Clark et al., ELECTRA, 2020; the depths of timm's models are those of `timm.optim`.
    """
    depths = _depths(model, layers_of, key)
    deepest = max(depths.values(), default=0)
    return {parameter: decay ** (deepest - depth) for parameter, depth in depths.items()}


def _depths(model: nn.Module, layers_of: Callable[[nn.Module], Any] | None, key: str) -> dict[nn.Parameter, int]:
    if layers_of is None and hasattr(type(model), "group_matcher"):
        return _of_timm(model)
    listed = _of_transformers(model, key) if layers_of is None else layers_of(model)
    layers = list(listed) if isinstance(listed, Iterable) else []
    if not layers or not all(isinstance(layer, nn.Module) for layer in layers):
        remedy = "Return the layers, from input to output: return list(model.blocks)"
        raise UserError(f"returned {listed!r}, not a list of modules", key=f"{key}.layers_of", remedy=remedy)
    inside: dict[nn.Parameter, int] = {}
    for depth, layer in enumerate(layers, start=1):
        for parameter in layer.parameters():
            inside.setdefault(parameter, depth)
    depths: dict[nn.Parameter, int] = {}
    depth = 0
    for parameter in model.parameters():  # a tied parameter comes at its first name
        if parameter in inside:
            depth = len(layers) + 1  # of those after this, outside of layers
        depths[parameter] = inside.get(parameter, depth)
    return depths


def _of_timm(model: Any) -> dict[nn.Parameter, int]:
    """Return the depths that timm's own layer decay uses."""
    names: dict[str, int] = sys.modules["timm.models"].group_parameters(  # the model has imported timm
        model, model.group_matcher(coarse=False), reverse=True
    )
    return {parameter: names[name] for name, parameter in model.named_parameters()}


def _of_transformers(model: Any, key: str) -> nn.ModuleList:
    """Return the only list of `config.num_hidden_layers` modules of a model of transformers."""
    count = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    found = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == count]
    if len(found) != 1:
        raise UserError(
            f"{type(model).__name__} does not list its layers" + (f", but {len(found)} lists" if found else ""),
            key=f"{key}.layer_decay",
            remedy=f"Set {key}.layers_of._target_ to a function of the model that returns its layers, from input to "
            "output: return list(model.blocks)",
        )
    return found[0]
