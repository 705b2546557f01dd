"""The optimizers of a run in its checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hydraloop.engine.checkpoint.format import Checkpoint
from hydraloop.engine.checkpoint.shards import with_replaced
from hydraloop.engine.checkpoint.weights import differs
from hydraloop.engine.distributed.fsdp import as_sharded, local, sharded_like
from hydraloop.engine.run_parts import Run

_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""How a step is computed. This depends on the device, the ranks and the layout of this run, not of the saved run."""


def meta(run: Run) -> dict[str, Any]:
    """Return the entries of `meta` about the optimizers (see `format.py`)."""
    kinds = {name: type(one).__name__ for name, one in run.optimizers.items()}
    return {
        "optimizer": kinds.get("", kinds),
        "groups": [{"optimizer": group.optimizer, "names": list(group.names)} for group in run.groups],
    }


def load(run: Run, checkpoint: Checkpoint, *, strict: bool) -> None:
    """Load the states of the optimizers; then write the hyperparameters that were typed for this run into all groups.

    Args:
        checkpoint: with the states.
        strict: False: with other optimizers or groups, the optimizers start without a state, with a warning.

    Raises:
        UserError: with `strict`, the optimizers or their groups are not those of the checkpoint.
    """
    old, here = _contents(checkpoint["meta"]), _contents(meta(run))
    for name in {**here, **old}:
        if old.get(name) != here.get(name):
            problem = "the optimizer or its parameter groups are not those of the checkpoint"
            remedy = (
                "Repeat optimizer, its match, groups and layer_decay as in the run, start a new run with load_from=…,"
            )
            differs(strict, f"optimizer.{name}".rstrip("."), problem, f"{remedy} or set")
            return
    for name, optimizer in run.optimizers.items():
        prefix = f"{name}." if name else ""
        typed = {
            option.removeprefix(prefix) for option in run.settings.optimizer_overrides if option.startswith(prefix)
        }
        load_state(optimizer, checkpoint["optimizer"][name] if name else checkpoint["optimizer"], typed)


def _contents(meta: Mapping[str, Any]) -> dict[str, tuple[str, list[list[str]]]]:
    """Return the class and the names of the parameters in each group, by optimizer."""
    kinds = meta["optimizer"] if isinstance(meta["optimizer"], dict) else {"": meta["optimizer"]}
    return {
        name: (kind, [group["names"] for group in meta["groups"] if group["optimizer"] == name])
        for name, kind in kinds.items()
    }


def load_state(optimizer: Optimizer, state: dict[str, Any], typed: Collection[str] = ()) -> None:
    """Load a state dict of the same optimizer; its tensors may be whole or shards.

    The implementation flags (`fused`) stay those of this optimizer. Each tensor keeps the type in which it was saved,
    where torch would convert it to the type of its parameter. Each moment gets the memory layout of its parameter,
    because fused kernels step through both in memory order and ignore strides.

    Args:
        typed: names of hyperparameters (`lr`) that stay those of this optimizer, too.
    """
    names = {*typed, *_IMPLEMENTATION}
    saved, groups = state["param_groups"], optimizer.param_groups
    parameters = {
        index: parameter
        for old, group in zip(saved, groups, strict=True)
        for index, parameter in zip(old["params"], group["params"], strict=True)
    }
    saved = [
        {key: value for key, value in old.items() if _name(key) not in names}
        | {key: value for key, value in group.items() if _name(key) in names}
        for old, group in zip(saved, groups, strict=True)
    ]
    entries = {index: _sharded_like(entry, parameters.get(index)) for index, entry in state["state"].items()}
    optimizer.load_state_dict({**state, "state": entries, "param_groups": saved})
    for index, parameter in parameters.items():
        entry = optimizer.state.get(parameter, {})
        for name, value in entry.items():
            entry[name] = _as_saved(value, entries.get(index, {}).get(name), parameter, name)


def _name(key: str) -> str:
    """Return the hyperparameter of an entry of a group; schedules store where it begins (`initial_betas.0`)."""
    return key.removeprefix("initial_").partition(".")[0]


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
