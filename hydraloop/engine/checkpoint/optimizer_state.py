"""Loads an optimizer's saved state, and replaces hyperparameters that were typed for a resumed run."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hydraloop.engine.checkpoint.nested import with_replaced
from hydraloop.engine.distributed.fsdp import as_sharded, local, sharded_like
from hydraloop.errors import UserError

log = logging.getLogger(__name__)

_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""How a step is computed. This depends on the device, the ranks and the layout of this run, not of the saved run."""
_DECIDE_STATE = ("amsgrad", "centered")
"""The state of each parameter depends on these, so they cannot change between two steps."""

Hyperparameters = dict[str, Any]
"""Of one parameter group, by name: a number or a tuple of numbers; None for any other entry."""


def load(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a state dict of the same kind of optimizer; its tensors may be whole or shards.

    The implementation flags (`fused`) stay those of this optimizer. Each tensor keeps the type in which it was saved,
    where torch would convert it to the type of its parameter. Each moment gets the memory layout of its parameter,
    because fused kernels step through both in memory order and ignore strides.

    Raises:
        ValueError: the numbers of groups or parameters differ.
    """
    saved, groups = state["param_groups"], optimizer.param_groups
    parameters = {
        index: parameter
        for old, group in zip(saved, groups, strict=False)  # if the numbers differ, torch raises
        for index, parameter in zip(old["params"], group["params"], strict=False)
    }
    saved = [
        {**old, **{flag: group[flag] for flag in _IMPLEMENTATION if flag in group}}
        for old, group in zip(saved, groups, strict=False)
    ] + saved[len(groups) :]
    entries = {index: _sharded_like(entry, parameters.get(index)) for index, entry in state["state"].items()}
    optimizer.load_state_dict({**state, "state": entries, "param_groups": saved})
    for index, parameter in parameters.items():
        entry = optimizer.state.get(parameter, {})
        for name, value in entry.items():
            entry[name] = _as_saved(value, entries.get(index, {}).get(name), parameter, name)


def _sharded_like(entry: Any, parameter: Tensor | None) -> Any:
    """Return the state of a parameter with its tensors sharded as the parameter is. No communication."""
    return with_replaced(entry, lambda value, path: as_sharded(value, parameter))


def _as_saved(loaded: Any, saved: Any, parameter: Tensor, name: str = "") -> Any:
    """Return a part of a parameter's state in the type in which it was saved, and in the layout of the parameter.

    On a CPU, torch keeps tensors of the saved type. They may be in a file that is mapped to memory, so they are copied.
    """
    if isinstance(loaded, dict) and isinstance(saved, dict):
        return {key: _as_saved(value, saved.get(key), parameter, str(key)) for key, value in loaded.items()}
    if type(loaded) in (list, tuple) and isinstance(saved, list | tuple) and len(loaded) == len(saved):
        return type(loaded)(_as_saved(*pair, parameter) for pair in zip(loaded, saved, strict=True))
    if not isinstance(loaded, Tensor):
        return loaded
    # torch gives the step count the type and the device that a fused kernel needs.
    if name != "step" and isinstance(saved, Tensor) and saved.dtype != loaded.dtype and saved.shape == loaded.shape:
        loaded = sharded_like(local(saved).to(local(loaded).device, copy=True), loaded)
    elif loaded.device.type == "cpu":
        loaded = loaded.clone()
    return _laid_out_like(loaded, parameter)


def _laid_out_like(value: Tensor, parameter: Tensor) -> Tensor:
    """Return the value with the strides of its parameter (of this rank's part); unchanged if its shape differs."""
    part, target = local(value), local(parameter)
    if type(part) is not Tensor or part.shape != target.shape or part.stride() == target.stride():
        return value
    return sharded_like(torch.empty_like(target, dtype=part.dtype, device=part.device).copy_(part), value)


def hyperparameters(optimizer: Optimizer) -> list[Hyperparameters]:
    """Return the numbers in each parameter group, as they were before any schedule changed them."""
    return [
        {name: _begin(group, name) for name in group if name != "params" and not name.startswith("initial_")}
        for group in optimizer.param_groups
    ]


def override(
    optimizer: Optimizer,
    given: Sequence[Hyperparameters],
    config: Sequence[Hyperparameters],
    names: Iterable[str],
    key: str = "optimizer",
) -> list[str]:
    """Replace loaded hyperparameters by those of this run's config, before the schedules are applied.

    Args:
        given: the hyperparameters of the checkpoint's run, for each group; changed in place.
        config: those of this run.
        names: of those to replace (`lr`). Equal ones stay.
        key: of the optimizer in the config.

    Returns:
        A line for each replaced name: `optimizer.lr: 0.001 -> 1e-05`.

    Raises:
        UserError: the saved state does not fit the new value.
    """
    lines = []
    for name in sorted({*names} - {*_IMPLEMENTATION}):
        old, new = ([values.get(name) for values in side] for side in (given, config))
        if None in old or None in new:
            log.warning("%s.%s has no effect on a resumed run: the parameter groups have no such number", key, name)
        elif old != new:
            if name in _DECIDE_STATE:
                raise UserError(
                    f"the checkpoint has the optimizer's state for {_words(old)}, which does not fit {_words(new)}",
                    key=f"{key}.{name}",
                    remedy=f"Use {key}.{name}={_words(old)}, or start a new run with load_from=…",
                )
            for group, value in zip(optimizer.param_groups, new, strict=True):
                _replace(group, name, value)
            for values, value in zip(given, new, strict=True):
                values[name] = value
            lines.append(f"{key}.{name}: {_words(old)} -> {_words(new)}")
    return lines


def kept(
    optimizer: Optimizer,
    given: Sequence[Hyperparameters],
    config: Sequence[Hyperparameters],
    set_by_schedule: Collection[str],
    key: str = "optimizer",
) -> list[str]:
    """Describe hyperparameters that differ from this run's config and stay, since they were not typed.

    Args:
        given: the hyperparameters after `override`.
        config: those of this run.
        set_by_schedule: names that a schedule sets to numbers from the config.
        key: of the optimizer in the config.

    Returns:
        A line for each name: `optimizer.lr stays 0.001 (the config has 1e-05); type optimizer.lr=1e-05 to change it`.
    """
    lines = []
    for name in sorted(optimizer.defaults.keys() - {*_IMPLEMENTATION}):
        old, new = ([values.get(name) for values in side] for side in (given, config))
        if None in old or None in new or old == new or name in set_by_schedule:
            continue
        line = f"{key}.{name} stays {_words(old)} (the config has {_words(new)})"
        value = new[0] if all(value == new[0] for value in new) else _begin(optimizer.defaults, name)
        if name not in _DECIDE_STATE and value is not None:
            value = list(value) if isinstance(value, tuple) else value
            line += f"; type {key}.{name}={str(value).replace(' ', '')} to change it"
        lines.append(line)
    return lines


def _replace(group: dict[str, Any], name: str, value: Any) -> None:
    """Set a hyperparameter, also in the entries from which schedules begin."""
    entries = _entries(group, name)
    for (initial, _), new in zip(entries, value if isinstance(value, tuple) else (value,), strict=True):
        if initial in group:
            group[initial] = new
    if isinstance(group[name], Tensor):  # with `capturable`, a CUDA graph may read it
        group[name].fill_(value)
    else:
        group[name] = type(group[name])(value) if isinstance(value, tuple) else value


def _begin(group: Mapping[str, Any], name: str) -> Any:
    """Return a number or a tuple of numbers of a group, before any schedule; None for any other entry."""
    entries = [group.get(initial, value) for initial, value in _entries(group, name)]
    plain = [entry.item() if isinstance(entry, Tensor) and entry.numel() == 1 else entry for entry in entries]
    if not all(isinstance(entry, int | float) for entry in plain):
        return None
    return tuple(plain) if isinstance(group[name], tuple | list) else plain[0]


def _entries(group: Mapping[str, Any], name: str) -> list[tuple[str, Any]]:
    """Return (key of the value before any schedule, value) for a number, or for each number of a tuple (`betas`)."""
    value = group[name]
    if isinstance(value, tuple | list):
        return [(f"initial_{name}.{index}", entry) for index, entry in enumerate(value)]
    return [(f"initial_{name}", value)]


def _words(values: Sequence[Any]) -> str:
    """Return the values of all groups as text; one value if they are equal."""
    return str(values[0] if all(value == values[0] for value in values) else list(values))
