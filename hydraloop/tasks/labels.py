"""Labels that are not below the number of classes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hydraloop.errors import UserError
from hydraloop.files.config_yaml import flattened

_COUNTS = ("class", "label", "vocab", "out")
"""Parts of the names of options that are a number of classes."""


def ignored_label(task: Any) -> int:
    """Return the `ignore_index` of a `Task` or of its loss; otherwise -100, the default of torch."""
    return getattr(task, "ignore_index", getattr(task.loss, "ignore_index", -100))


def labels_error(task: Any, labels: Tensor, classes: int, where: str = "a batch") -> UserError:
    """Return the error of integer labels, some of which are neither in 0 … classes - 1 nor ignored.

    Args:
        task: a `Task`. Its options name the option to change.
        where: has the labels, for the error.
    """
    found = sorted(set(labels.flatten().tolist()) - {ignored_label(task)})
    wrong = [label for label in found if not 0 <= label < classes]
    shown = ", ".join(map(str, found)) if len(found) <= 12 else f"{found[0]} to {found[-1]}"
    problem = f"the model has {classes} classes, 0 to {classes - 1}, but the labels in {where} are {shown}"
    if wrong[0] < 0 or wrong == [255]:
        option = "task.ignore_index" if hasattr(task, "ignore_index") else "+task.loss.ignore_index"
        remedy = f"If {wrong[0]} means that there is no label: {option}={wrong[0]}. Classes begin at 0."
        return UserError(problem, key="task.model", remedy=remedy)
    options = flattened(task.options.get("model"), "task.model").items()
    keys = [key for key, value in options if value == classes and any(map(key.rpartition(".")[2].count, _COUNTS))][:1]
    if keys and "num_classes" in task.options and not keys[0].endswith(".num_classes"):
        keys.append("task.num_classes")
    needed = found[-1] + 1
    remedy = f"Use {' '.join(f'{key}={needed}' for key in keys)}." if keys else f"Let the model have {needed} classes."
    if found[0] > 0:
        remedy += " Classes begin at 0: if yours do not, let the data set subtract the first one."
    return UserError(problem, key=keys[0] if keys else "task.model", remedy=remedy)
