"""The optimizer and its parameter groups, as printed before training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from hydraloop.engine.optimizers.parameter_groups import Group
from hydraloop.engine.report.hook_table import COLUMNS
from hydraloop.engine.run import Run

_MOST_GROUPS = 12
"""Groups that are printed: more do not fit on one screen."""


def group_names(groups: Sequence[Group]) -> list[str]:
    """Return the name of each group in the table and in the record.

    It is the label: `0`, `1`, `head`. With several optimizers, the first group of each has the name of its optimizer
    (`generator`), and the others have it before their label (`generator.1`).
    """
    names: list[str] = []
    for group in groups:
        name = ".".join(filter(None, (group.optimizer, group.label)))
        if group.optimizer and group.optimizer not in names:
            name = group.optimizer
        names.append(f"{name}.{len(names)}" if name in names else name)  # two groups may have one label
    return names


def format_optimizer(run: Run, width: int) -> str:
    """Return the class, lr and weight decay; with several groups a line for each, without empty ones.

    What else differs between the groups of an optimizer is shown, too. Numbers are those before any schedule.

    Args:
        run: has an optimizer.
        width: of the column to the left.
    """
    groups, hyperparameters = run.groups, [_hyperparameters(group) for group in run.optimizer.param_groups]
    kinds = ", ".join(f"{name} {type(one).__name__}".strip() for name, one in run.optimizers.items())
    shown, first = ["lr", "weight_decay"], dict[str, Mapping[str, Any]]()
    for group, own in zip(groups, hyperparameters, strict=True):
        others = first.setdefault(group.optimizer, own)
        shown += [name for name in own if own[name] != others.get(name, "") and name not in shown]
    numbers = [[values.get(name, "") for name in shown] for values in hyperparameters]
    rows = [
        [name, f"{len(group.names)}", f"{_size(own):,}", *values, group.names]
        for name, group, own, values in zip(
            group_names(groups), groups, run.optimizer.param_groups, numbers, strict=True
        )
        if group.names
    ]
    if len(rows) < 2:
        values = (f"{name} {value}" for name, value in zip(shown, numbers[0], strict=True) if value)
        return ", ".join([kinds, *values])
    head: list[Any] = ["group", "tensors", "parameters", *shown, ()]
    table = [head, *rows[:_MOST_GROUPS]]
    widths = [max(len(row[column]) for row in table) for column in range(len(head) - 1)]
    lines = []
    for row in table:
        cells = [
            f"{row[0]:<{widths[0]}}",
            *(f"{cell:>{width}}" for cell, width in zip(row[1:-1], widths[1:], strict=True)),
        ]
        line = "  ".join(cells)
        lines.append(f"{line}  {_fitting(row[-1], COLUMNS - width - len(line) - 2)}".rstrip())
    left = [f"… {len(rows) - _MOST_GROUPS} more"] if len(rows) > _MOST_GROUPS else []
    return "\n".join([f"{kinds}, {len(rows)} groups", *lines, *left])


def _fitting(names: Sequence[str], room: int) -> str:
    """Return as many names as fit, at least one."""
    text = names[0] if names else ""
    for name in names[1:]:
        if len(text) + len(name) + len(", , …") > room:
            return f"{text}, …"
        text += f", {name}"
    return text


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, str]:
    """Return the numbers of a group before any schedule, as text."""
    own = {name: value for name, value in group.items() if name != "params" and not name.startswith("initial_")}
    return {name: _number(group.get(f"initial_{name}", value)) for name, value in own.items()}


def _number(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_number, value))
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    return f"{value:.4g}" if isinstance(value, int | float) else ""


def _size(group: dict[str, Any]) -> int:
    return sum(parameter.numel() for parameter in group["params"])
