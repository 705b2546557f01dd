"""NumClassCheckHook: the model's number of classes against the data sets'."""

from __future__ import annotations

import logging
from collections.abc import Sequence, Sized
from numbers import Integral
from typing import TYPE_CHECKING, Any

from hydraloop.engine.hook import Hook, Priority
from hydraloop.errors import UserError
from hydraloop.hooks.shared.data_sets import data_sets_with

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine

log = logging.getLogger(__name__)


class NumClassCheckHook(Hook):
    """Refuses a model whose `num_classes` is not the number of the data sets' `classes`, before the first iteration.

    Without it a model with too few outputs fails in the loss, on a GPU with an assertion that names nothing, and one
    with too many trains and is silently worse. Looked at are the integers called `num_classes` of the task and of all
    modules in it (model, heads, loss), and `classes` (names, or anything with a length) of the train, val and test data
    sets; wrappers are looked through (`dataset`, `datasets`). What cannot be compared is one warning.

    Mount points: before_run. Priority NORMAL, MMDetection's: it only looks. No host sync, nothing in an iteration. No
    state. Source: MMDetection's NumClassCheckHook, which looks at train and val; a test on other classes is as wrong.

    Args:
        ignore: modules, by the end of their name in the task (`roi_head.mask_head`), whose number means something else;
            in Python, a single one may be a string. None: MMDetection's, `rpn_head`, which tells objects from
            background. One that fits no module with a number is a warning.

    Raises:
        UserError: before the first iteration: the numbers differ, or `classes` is a single string.
    """

    priority = Priority.NORMAL

    def __init__(self, *, ignore: Sequence[str] | None = None) -> None:
        given = () if ignore is None else (ignore,) if isinstance(ignore, str) else tuple(ignore)
        self._given = given
        self.ignore = ("rpn_head",) if ignore is None else given

    def before_run(self, engine: Engine) -> None:
        """Compare each number with each data set.

        Raises:
            UserError: two differ.
        """
        found = _numbers_of(engine.task)
        numbers = {key: number for name, (key, number) in found.items() if not name.endswith(self.ignore)}
        unmatched = [end for end in self._given if not any(name.endswith(end) for name in found)]
        if unmatched:
            names = ", ".join(name or "the task" for name in found) or "none"
            log.warning("%s.ignore: no module with num_classes is called %s; there are: %s",
                        self.key, " or ".join(unmatched), names)  # fmt: skip
        loaders = {"train": engine.loaders.train, "val": engine.loaders.val, "test": engine.loaders.test}
        unknown: list[str] = []
        for split, loader in loaders.items():
            data_sets = data_sets_with("classes", loader, outermost=True)
            if loader is not None and not data_sets:
                unknown.append(f"the data set of data.{split} has no classes")
            for data in data_sets:
                count = _count(data, split)
                for key, number in numbers.items():
                    if number != count:
                        raise self._differ(key, number, data, split, count)
        if not numbers:
            log.warning(
                "%s: nothing was checked: no module of %s has num_classes", self.key, type(engine.task).__name__
            )
        elif unknown:
            log.warning("%s: not checked: %s", self.key, ", ".join(unknown))

    def _differ(self, key: str, number: int, data: Any, split: str, count: int) -> UserError:
        remedy = f"Use {key}={count}, or the data set that the model is for."
        name = key.removeprefix("task.").removesuffix("num_classes").rstrip(".")
        if name:
            ignored = ",".join(dict.fromkeys((*self.ignore, name)))
            remedy += f" If this number means something else: {self.key}.ignore=[{ignored}]."
        classes = _shortened(data.classes)
        return UserError(
            f"it is {number}, and {type(data).__name__} of data.{split} has {count} classes ({classes})",
            key=key,
            remedy=remedy,
        )


def _numbers_of(task: Any) -> dict[str, tuple[str, int]]:
    """By the names of modules: where the number of classes is, and the number."""
    found: dict[str, int] = {}
    for name, module in task.named_modules():
        number = getattr(module, "num_classes", None)
        if not isinstance(number, bool) and isinstance(number, Integral):
            found[name] = int(number)
    if len(found) > 1:
        found.pop("", None)  # a task repeats its model's
    return {
        name: (".".join(part for part in ("task", name, "num_classes") if part), number)
        for name, number in found.items()
    }


def _count(data: Any, split: str) -> int:
    classes = data.classes
    if isinstance(classes, str) or not isinstance(classes, Sized):
        raise UserError(
            f"classes of {type(data).__name__} is {classes!r}, not a list of names",
            key=f"data.{split}",
            remedy=f"Let it be a tuple of strings; with one class: ({classes!r},).",
        )
    return len(classes)


def _shortened(classes: Any) -> str:
    names = [str(name) for name in classes]
    return ", ".join(names if len(names) < 6 else [*names[:3], "…", names[-1]])
