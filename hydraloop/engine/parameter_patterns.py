"""Patterns for names of modules, parameters and checkpoint entries: a glob, or `re:` and a regular expression.

Patterns of `match` also choose parameters by their kind.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

from torch import nn

from hydraloop.errors import UserError, any_of, close_names

Places: TypeAlias = dict[nn.Parameter, list[tuple[str, nn.Module]]]
"""Each parameter with its names in the model, and the module that has it by this name. A tied one has several."""

# _NormBase: BatchNorm and InstanceNorm of any dimension.
_MULTI_DIM_NORMS = (nn.LayerNorm, nn.RMSNorm)  # their weights may have several dimensions
_KINDS = ("@norm", "@bias", "@embedding", "@matrix")


def _compiled(pattern: str, key: str) -> re.Pattern[str]:
    """Return the regular expression of a pattern.

    Args:
        pattern: a glob, in which `*` also matches dots, or `re:` and a regular expression.
        key: the option that has the pattern, for the error.

    Raises:
        UserError: the regular expression is wrong.
    """
    if not pattern.startswith("re:"):
        return re.compile(fnmatch.translate(pattern))
    try:
        return re.compile(pattern.removeprefix("re:"))
    except re.error as error:
        remedy = r"A \ before a character such as [ or . removes its special meaning."
        raise UserError(f"'{pattern}' is not a regular expression: {error}", key=key, remedy=remedy) from error


def matching(patterns: Iterable[str], names: Collection[str], key: str) -> set[str]:
    """Return the names that match one of the patterns, or are in a module whose name does.

    Raises:
        UserError: a pattern matches no name; the remedy has close names.
    """
    found: set[str] = set()
    for pattern in patterns:
        expression = _compiled(pattern, key)
        new = {name for name in names if any(expression.fullmatch(part) for part in _with_modules(name))}
        if not new:
            raise UserError(f"{pattern!r} matches no name", key=key, remedy=_close_to(pattern, names))
        found |= new
    return found


def _close_to(pattern: str, names: Collection[str]) -> str:
    """Return a sentence with the names, or parts of them before a dot, that resemble a pattern; else with the first."""
    parts = {part for name in names for part in _with_modules(name)}
    close = close_names(pattern.removeprefix("re:").strip(".*^$"), sorted(parts))
    if close:
        return f"Did you mean {any_of(close)}?"
    return f"The names are {', '.join(list(names)[:3])}, …"


def _with_modules(name: str) -> list[str]:
    """Return the names of the modules that a parameter or module is in, and its own."""
    return [*(name[: dot.start()] for dot in re.finditer(r"\.", name)), name]


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
