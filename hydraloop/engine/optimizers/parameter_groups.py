"""The parameter groups of an optimizer with the names of their parameters, as printed and as saved."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn, optim

from hydraloop.engine.optimizers.optimizer_set import parts


class Group(NamedTuple):
    """One parameter group."""

    optimizer: str
    """The name of its optimizer; empty if there is one."""
    label: str
    """Its number in the optimizer, or its name if it has one. It is unique in the optimizer."""
    names: tuple[str, ...]
    """Its parameters, by their names in the model's state dict; empty for a group without parameters."""


def describe(optimizer: optim.Optimizer, model: nn.Module) -> list[Group]:
    """Return the groups in the order of `optimizer.param_groups`."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = []
    for key, one in parts(optimizer).items():
        labels = [str(group.get("name", index)) for index, group in enumerate(one.param_groups)]
        for index, (group, label) in enumerate(zip(one.param_groups, labels, strict=True)):
            unique = f"{label}.{index}" if label in labels[:index] else label
            found.append(Group(key, unique, tuple(names.get(parameter, "?") for parameter in group["params"])))
    return found
