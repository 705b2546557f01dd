"""NumClassCheckHook: the model's number of classes against the data sets'."""

from __future__ import annotations

import logging
from collections.abc import Sequence, Sized
from typing import TYPE_CHECKING, Any

from hydraloop.engine.hook import Hook, Priority
from hydraloop.errors import UserError
from hydraloop.hooks.data_sets import data_sets_with

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
        ignore: modules, by the end of their name in the task (`roi_head.mask_head`), whose number means something else.
            None: MMDetection's, `rpn_head`, which tells objects from background.

    Raises:
        UserError: before the first iteration: the numbers differ, or `classes` is a single string.
    """

    priority = Priority.NORMAL

    def __init__(self, *, ignore: Sequence[str] | None = None) -> None:
        self.ignore = ("rpn_head",) if ignore is None else tuple(ignore)

    def before_run(self, engine: Engine) -> None:
        """Compare each number with each data set.

        Raises:
            UserError: two differ.
        """
        numbers = _numbers_of(engine.task, self.ignore)
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
                        raise _differ(key, number, data, split, count)
        if not numbers:
            log.warning(
                "%s: nothing was checked: no module of %s has num_classes", self.key, type(engine.task).__name__
            )
        elif unknown:
            log.warning("%s: not checked: %s", self.key, ", ".join(unknown))


def _numbers_of(task: Any, ignore: Sequence[str]) -> dict[str, int]:
    """The numbers of classes, by where they are."""
    found: dict[str, int] = {}
    for name, module in task.named_modules():
        number = getattr(module, "num_classes", None)
        if isinstance(number, int) and not isinstance(number, bool):
            found[name] = number
    if len(found) > 1:
        found.pop("", None)  # a task repeats its model's
    return {
        ".".join(part for part in ("task", name, "num_classes") if part): number
        for name, number in found.items()
        if not any(name.endswith(end) for end in ignore)
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


def _differ(key: str, number: int, data: Any, split: str, count: int) -> UserError:
    return UserError(
        f"it is {number}, and {type(data).__name__} of data.{split} has {count} classes ({_shortened(data.classes)})",
        key=key,
        remedy=f"Use {key}={count}, or the data set that the model is for.",
    )


def _shortened(classes: Any) -> str:
    names = [str(name) for name in classes]
    return ", ".join(names if len(names) < 6 else [*names[:3], "…", names[-1]])
