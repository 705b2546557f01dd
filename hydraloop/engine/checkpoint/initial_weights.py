"""Initial weights from a file: `load_from` for the whole model, `init` for the entries that fit, after some rules."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hydraloop.engine.checkpoint.format import EVALUATED, Checkpoint, evaluation_weights, load
from hydraloop.engine.checkpoint.weights import load_weights
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.parameter_patterns import matching
from hydraloop.engine.run_parts import Run
from hydraloop.errors import UserError

log = logging.getLogger(__name__)

_ALONE = Distributed()
_STATE_DICTS = ("state_dict", "model", "model_state_dict")
"""Entries that contain the weights; the first one counts."""
_WRAPPERS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Parts that DDP, torch.compile, checkpointing and FSDP add to names, around the model or any of its modules."""
_FEW = 6
"""Up to this many names are listed in the table."""


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
    checkpoint = load(path, key=key, mmap=True, ranks=run.ranks, whole=True, only=EVALUATED)
    tied = _tied(run.model)
    state = evaluation_weights(_weights(checkpoint, tied.keys(), path, key), run.settings.weights)
    load_weights(run, {**_for_tied(state, tied), **state}, key)
    log.info("weights loaded from %s", path)
    return checkpoint


@dataclass(frozen=True)
class Rules:
    """From names in a file to names in the model; see `hydraloop.schemas.root.InitConf`."""

    prefix: str | None = None
    exclude: Sequence[str] = ()
    mismatched: str = "error"


def initialise(model: nn.Module, path: Path, rules: Rules, ranks: Distributed = _ALONE) -> None:
    """Load the entries of a file that have a name of the model, and log a table of what was taken and what was not.

    Called on every rank.

    Raises:
        UserError: no entry has a name of the model, one that does has another shape, or a rule concerns no entry.
    """
    own = model.state_dict()
    tied = _tied(model)
    loaded = load(path, key="init.checkpoint", ranks=ranks, whole=True)
    state = evaluation_weights(_weights(loaded, own.keys(), path, "init.checkpoint"))
    if rules.prefix is not None:
        prefix = rules.prefix if rules.prefix.endswith(".") else f"{rules.prefix}."
        state = _of_part(state, prefix, own.keys(), path)
    state |= _for_tied(state, tied)
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
            remedy="Set init.prefix to what precedes the model's names in the file.",
        )
    model.load_state_dict(taken, strict=False)
    rows = {
        "taken": taken,
        "other shape": other_shape.values(),
        "excluded": excluded,
        "missing in the file": own.keys() - state.keys(),
        "not in the model": state.keys() - own.keys() - excluded,
    }
    log.info("%d of %d entries of the model taken from %s%s", len(taken), len(own), path, _table(rows))


def _weights(checkpoint: Mapping[str, Any], own: Collection[str], path: Path, key: str) -> dict[str, Any]:
    """Return the weights under `state_dict`, named without the wrappers of DDP, torch.compile, checkpointing and FSDP.

    Other entries are kept if there is a `meta`, which says whether there are averaged weights.

    Args:
        checkpoint: as loaded.
        own: the names in the model, which may begin with the same words as the wrappers' names.
        path: its file, for the error.
        key: the option that named the file, for the error.

    Raises:
        UserError: it contains no state dict.
    """
    inner = (checkpoint[entry] for entry in _STATE_DICTS if isinstance(checkpoint.get(entry), Mapping))
    state = next(inner, checkpoint)
    tensors = any(isinstance(value, Tensor) for value in state.values())
    if not tensors or not all(isinstance(name, str) for name in state):
        raise UserError(
            f"{path} contains no state dict; its entries are {', '.join(map(str, list(checkpoint)[:5]))}",
            key=key,
            remedy="Save the state dict alone with torch.save(model.state_dict(), path) and load that.",
        )
    without_wrappers = {name if name in own else _without_wrappers(name): value for name, value in state.items()}
    if len(without_wrappers) == len(state):  # otherwise the parts are no wrappers
        state = without_wrappers
    return {**(checkpoint if isinstance(checkpoint.get("meta"), Mapping) else {}), "state_dict": state}


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


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
    """Return the first names."""
    return ", ".join(sorted(names)[:_FEW]) + (f" and {len(names) - _FEW} more" if len(names) > _FEW else "")


def _shape(value: Any) -> tuple[int, ...] | None:
    """Return the shape of a tensor; None for an entry that is not one."""
    return tuple(value.shape) if hasattr(value, "shape") else None


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
