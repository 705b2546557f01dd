"""Several optimizers as one, so that no other part needs a loop over them, and parameter groups with names."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn, optim


class OptimizerSet(optim.Optimizer):
    """Optimizers of different parameters, which step together. `param_groups` has the groups of all, in order.

    Args:
        named: by name, in the order of the steps.
    """

    # Optimizer.__init__ is not called: it would copy the groups and add its profiler to `step` a second time.
    def __init__(self, named: Mapping[str, optim.Optimizer]) -> None:
        self.named: dict[str, optim.Optimizer] = dict(named)
        self.defaults: dict[str, Any] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # loading replaces the list of each
        """The groups of all optimizers."""
        return [group for one in self.named.values() for group in one.param_groups]

    @property
    def state(self) -> Mapping[Tensor, Any]:  # type: ignore[override]  # a view of those of all, to be read
        """The state of each parameter, in all optimizers."""
        return ChainMap(*(one.state for one in self.named.values()))

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]  # there is no closure
        """Step all optimizers."""
        for one in self.named.values():
            one.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove the gradients of all parameters."""
        for one in self.named.values():
            one.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of each optimizer by its name."""
        return {name: one.state_dict() for name, one in self.named.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        for name, one in self.named.items():
            one.load_state_dict(state_dict[name])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse it, because it does not say to which optimizer the group belongs."""
        raise TypeError("add the parameter group to one of engine.run.optimizers")


def parts(optimizer: optim.Optimizer) -> dict[str, optim.Optimizer]:
    """Return the optimizers by name; the name of a single one is empty."""
    return optimizer.named if isinstance(optimizer, OptimizerSet) else {"": optimizer}


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
