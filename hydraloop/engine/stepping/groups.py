"""The parameter groups of an optimizer with the names of their parameters, as printed and as saved."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn, optim

from hydraloop.engine.stepping.several import parts


class Group(NamedTuple):
    """One parameter group."""

    optimizer: str
    """The name of its optimizer; empty if there is one."""
    label: str
    """Its number in the optimizer, or its name if it has one."""
    names: tuple[str, ...]
    """Its parameters, by their names in the model's state dict."""


def describe(optimizer: optim.Optimizer, model: nn.Module) -> list[Group]:
    """Return the groups in the order of `optimizer.param_groups`."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [
        Group(key, str(group.get("name", index)), tuple(names.get(parameter, "?") for parameter in group["params"]))
        for key, one in parts(optimizer).items()
        for index, group in enumerate(one.param_groups)
    ]
