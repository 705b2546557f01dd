"""NumClassCheckHook: compares the model's number of classes with the data sets'."""

from __future__ import annotations

import logging
from collections.abc import Sequence, Sized
from itertools import product
from numbers import Integral
from typing import Any

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import data_sets_with
from hydraloop.errors import UserError

log = logging.getLogger(__name__)


class NumClassCheckHook(Hook):
    """Rejects a model whose `num_classes` differs from the number of the data sets' `classes`, before the first
    iteration.

    Without this check, a model with too few outputs fails in the loss (on a GPU with an assertion that names nothing),
    and a model with too many trains and is silently worse. The hook compares integers called `num_classes` of the task
    and all its modules (model, heads, loss) with `classes` (names, or anything with a length) of the train, val and
    test data sets and of those they wrap (`dataset`, `datasets`). It warns once about what it cannot compare.

    Priority NORMAL, MMDetection's. No host sync, nothing in an iteration. No state. Options: `NumClassCheckHookConf`.
    From MMDetection's NumClassCheckHook, which looks at train and val only.

    Raises:
        UserError: before the first iteration, the numbers differ.
    """

    def __init__(self, *, ignore: Sequence[str] | None = None) -> None:
        self.ignore = ("rpn_head",) if ignore is None else tuple(ignore)

    def before_run(self, engine: Engine) -> None:
        numbers = _numbers_of(engine.task)
        checked = {name: number for name, number in numbers.items() if not name.endswith(self.ignore)}
        unknown: list[str] = []
        for key, loader in engine.loaders.by_key().items():
            split = key.replace("/", ".")
            data_sets = data_sets_with("classes", loader, outermost=True)
            having = [data for data in data_sets if isinstance(data.classes, Sized)]
            if not having:
                unknown.append(f"the data set of data.{split} has no classes")
            for data, (name, number) in product(having, checked.items()):
                if number != len(data.classes):
                    raise self._differ(name, number, data, split)
        if not checked:
            log.warning(
                "%s: nothing was checked: no module of %s has num_classes", self.key, type(engine.task).__name__
            )
        elif unknown:
            log.warning("%s: not checked: %s", self.key, ", ".join(unknown))

    def _differ(self, name: str, number: int, data: Any, split: str) -> UserError:
        count = len(data.classes)
        key = ".".join(part for part in ("task", name, "num_classes") if part)
        remedy = f"Use {key}={count}, or the data set that the model is for."
        if name:
            ignored = ",".join(dict.fromkeys((*self.ignore, name)))
            remedy += f" If this number means something else: {self.key}.ignore=[{ignored}]."
        problem = f"it is {number}, but {type(data).__name__} of data.{split} has {count} classes"
        return UserError(problem, key=key, remedy=remedy)


def _numbers_of(task: Any) -> dict[str, int]:
    """Return {module name in the task: its number of classes}; the task's name is empty."""
    found: dict[str, int] = {}
    for name, module in task.named_modules():
        number = getattr(module, "num_classes", None)
        if not isinstance(number, bool) and isinstance(number, Integral):
            found[name] = int(number)
    if len(found) > 1:
        found.pop("", None)  # a task repeats its model's number
    return found
