"""Initial weights from a file: `load_from` for the whole model, `init` for the entries that fit, after some rules."""

from __future__ import annotations

import itertools
import logging
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hydraloop.engine.checkpoint.foreign import find_weights
from hydraloop.engine.checkpoint.format import EVALUATED, Checkpoint, evaluation_weights, load
from hydraloop.engine.checkpoint.names import close_to, compiled, matching
from hydraloop.engine.checkpoint.weights import load_weights
from hydraloop.engine.run import Run
from hydraloop.errors import UserError

log = logging.getLogger(__name__)

_FEW = 6
"""Up to this many names are listed in the table; more are counted by module."""


def load_from(run: Run) -> Checkpoint | None:
    """Load the weights of `load_from`, before the model is wrapped for training.

    Returns:
        The contents of the file; tensors are read from it when they are used. None without `load_from`.

    Raises:
        UserError: the file does not fit the model; names the entry.
    """
    path, key = run.settings.load_from, "load_from"
    if path is None or run.settings.resume is not None:
        return None
    checkpoint = load(path, key=key, mmap=True, foreign=True, only=EVALUATED)
    tied = _tied(run.model)
    state = _weights(checkpoint, tied.keys(), path, key, run.settings.weights)
    load_weights(run, {**_for_tied(state, tied), **state}, key)
    log.info("weights loaded from %s", path)
    return checkpoint


@dataclass(frozen=True)
class Rules:
    """From names in a file to names in the model; see `hydraloop.schemas.root.InitConf`."""

    prefix: str | None = None
    exclude: Sequence[str] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    mismatched: str = "error"


def initialise(model: nn.Module, path: Path, rules: Rules) -> None:
    """Load the entries of a file that have a name of the model, and log a table of what was taken and what was not.

    Raises:
        UserError: no entry has a name of the model, one that does has another shape, or a rule concerns no entry.
    """
    own, tied = model.state_dict(), _tied(model)
    state = _weights(load(path, key="init.checkpoint", foreign=True), own.keys(), path, "init.checkpoint")
    for old, new in rules.rename.items():
        state = _renamed(state, old, new)
    if rules.prefix is not None:
        prefix = rules.prefix if rules.prefix.endswith(".") else f"{rules.prefix}."
        state = _of_part(state, prefix, own.keys(), path)
    added = _for_tied(state, tied)
    state |= added
    excluded = {
        twin for name in matching(rules.exclude, state.keys(), "init.exclude") for twin in tied.get(name, [name])
    }
    other_shape = {
        name: f"{name}: {_shape(value)} in the file and {_shape(own[name])} in the model"
        for name, value in state.items()
        if name in own and name not in excluded and _shape(value) != _shape(own[name])
    }
    taken = {name: state[name] for name in state if name in own and name not in excluded and name not in other_shape}
    if other_shape and rules.mismatched == "error":
        first = next(iter(other_shape))
        module = first.rpartition(".")[0]
        raise UserError(
            f"the file has other shapes than the model: {'; '.join([*other_shape.values()][:3])}",
            key="init.checkpoint",
            remedy="To keep the model's own values there, set init.mismatched=skip or "
            f"'init.exclude=[{f'{module}.*' if module else first}]'.",
        )
    if not taken:
        raise UserError(
            f"no entry of {path} has a name of the model: the file has {', '.join([*state][:3])}, …, and the model has "
            f"{', '.join([*own][:3])}, …",
            key="init.checkpoint",
            remedy="Set init.prefix to what precedes the model's names in the file, or init.rename.",
        )
    model.load_state_dict(taken, strict=False)
    rows = {
        "taken": taken.keys() - added.keys(),
        "taken for a tied one": taken.keys() & added.keys(),
        "other shape": other_shape.values(),
        "excluded": excluded,
        "missing in the file": own.keys() - state.keys(),
        "left over in the file": state.keys() - own.keys() - excluded,
    }
    log.info("%d of %d entries of the model taken from %s%s", len(taken), len(own), path, _table(rows))


def _weights(
    checkpoint: Mapping[str, Any], own: Collection[str], path: Path, key: str, weights: str = "averaged"
) -> dict[str, Any]:
    """Return the weights of a loaded file for a model that has the names `own`.

    Raises:
        UserError: it has no weights, or the averaged ones are missing.
    """
    found = find_weights(checkpoint, own, path, key)
    try:
        return dict(evaluation_weights(found, weights))
    except KeyError as error:
        raise UserError(
            f"{path} does not have the averaged weights of {found['meta']['averaged_weights']}, which its meta names",
            key=key,
            remedy="For the raw ones, save them alone with torch.save(checkpoint['state_dict'], path) and load that.",
        ) from error


def _tied(model: nn.Module) -> dict[str, list[str]]:
    """Return, for each entry of the model, the names of its tensor: tied weights have several."""
    names: dict[int | str, list[str]] = {}
    keys = {
        name: id(value) if isinstance(value, Tensor) else name
        for name, value in model.state_dict(keep_vars=True).items()
    }
    for name, key in keys.items():
        names.setdefault(key, []).append(name)
    return {name: names[key] for name, key in keys.items()}


def _for_tied(state: Mapping[str, Any], tied: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return the entries that a file has only under another name of a tied tensor, as safetensors writes them."""
    return {
        name: state[present[-1]]
        for name, names in tied.items()
        if name not in state and (present := [twin for twin in names if twin in state])
    }


def _table(rows: Mapping[str, Collection[str]]) -> str:
    """Return a line for each row that is not empty: its title, how many names it has, and which."""
    return "".join(f"\n  {title:21} {len(names):5}  {_listed(names)}" for title, names in rows.items() if names)


def _listed(names: Collection[str]) -> str:
    """Return a few names, or the modules that have them with their numbers of names."""
    if len(names) <= _FEW:
        return ", ".join(sorted(names))
    parts = [name.split(".") for name in sorted(names)]
    depth = next(depth for depth in itertools.count(1) if len({".".join(part[:depth]) for part in parts}) > 1)
    modules = {module: [*group] for module, group in itertools.groupby(parts, lambda part: ".".join(part[:depth]))}
    listed = [
        ".".join(group[0]) if len(group) == 1 else f"{module}.* ({len(group)})" for module, group in modules.items()
    ]
    return ", ".join(listed[:_FEW]) + (f" and {len(listed) - _FEW} more" if len(listed) > _FEW else "")


def _shape(value: Any) -> tuple[int, ...] | None:
    """Return the shape of a tensor; None for an entry that is not one."""
    return tuple(value.shape) if hasattr(value, "shape") else None


def _renamed(state: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    """Return the entries with a rule of `init.rename` applied to their names.

    Raises:
        UserError: the rule changes no name, or gives two entries the same name.
    """
    key = "init.rename"
    if old.startswith("re:"):
        expression = compiled(old, key)
        try:
            names = {name: expression.sub(new, name) for name in state}
        except (re.error, IndexError) as error:
            raise UserError(f"{new!r} does not fit {old!r}: {error}", key=key) from error
    else:
        names = {name: f"{new}{name.removeprefix(old)}" if name.startswith(old) else name for name in state}
    if all(name == renamed for name, renamed in names.items()):
        raise UserError(f"{old!r} changes no name of the file", key=key, remedy=close_to(old, state.keys()))
    twice = [name for name, count in Counter(names.values()).items() if count > 1]
    if twice:
        raise UserError(f"after {old!r}, two entries of the file have the name {twice[0]}", key=key)
    return {renamed: state[name] for name, renamed in names.items()}


def _of_part(state: dict[str, Any], prefix: str, own: Collection[str], path: Path) -> dict[str, Any]:
    """Return the entries of one part, by their names in a model that has the names `own`.

    Raises:
        UserError: the file does not have that part.
    """
    part = {name: value for name, value in state.items() if name.startswith(prefix)}
    if part and any(name.startswith(prefix) for name in own):
        return part
    if part:
        return {name.removeprefix(prefix): value for name, value in part.items()}
    whole = {f"{prefix}{name}": value for name, value in state.items() if f"{prefix}{name}" in own}
    if whole:
        return whole
    raise UserError(
        f"no entry of {path} begins with {prefix!r}; it has {', '.join(list(state)[:3])}, …",
        key="init.prefix",
        remedy="Use what precedes the names of the part, in the file or in the model, or null for all entries.",
    )
