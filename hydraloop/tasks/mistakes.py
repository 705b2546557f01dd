"""What an error in a task says about the model and the data. Used after the error only, and costs nothing before it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from hydraloop.engine.evaluation.first_batches import first_batches
from hydraloop.engine.loaders import sets_of
from hydraloop.errors import UserError
from hydraloop.tasks.layer_inputs import described, needed_input
from hydraloop.tasks.values import contents
from hydraloop.tracking.run_description import flattened

_ENGINE = str(Path(__file__).parents[1] / "engine")
_SPLITS = {"check_validation": "val", "validate": "val", "test": "test"}
"""The split that a function of the engine evaluates. Without one of them, the batch is of `train`."""
_COUNTED = ("class", "label", "vocab", "out")
"""Parts of the names of options that are a number of classes."""


def mistake_in(task: Any, error: BaseException) -> UserError | None:
    """Return the mistake in the model or the data that made a task fail; None if it is not known.

    Args:
        task: a `Task`.
        error: raised in the task. Its traceback has the batch.
    """
    if not isinstance(error, Exception) or isinstance(error, UserError):
        return None
    if "device-side assert" in str(error):
        return _device_assert(task)
    if "does not have a deterministic implementation" in str(error):
        problem = f"{str(error).split()[0]} has no deterministic implementation on this device"
        remedy = "Use another layer, or engine.deterministic=false."
        return UserError(problem, key="engine.deterministic", remedy=remedy)
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]  # the innermost last
    of_task = (frame for frame in frames if frame.f_locals.get("self") is task and frame.f_code.co_argcount > 1)
    own = next(of_task, None)  # forward, evaluate or count, whose first argument is the batch
    if own is None:
        return None
    batch = own.f_locals.get(own.f_code.co_varnames[1])
    names = [frame.f_code.co_name for frame in frames if frame.f_code.co_filename.startswith(_ENGINE)]
    split = next((_SPLITS[name] for name in names if name in _SPLITS), "train")
    return _wrong_form(task, batch, split) or _wrong_labels(task, frames, split) or _wrong_input(task, frames, error)


# Batches. ------------------------------------------------------------------------------------------------------------


def _wrong_form(task: Any, batch: Any, split: str) -> UserError | None:
    """Return the mistake of a batch that is not a pair, for tasks with a `forward` of hydraloop."""
    form: str = task.batch_form
    fits = isinstance(batch, tuple | list) and len(batch) == 2 and isinstance(batch[1], Tensor)
    fits |= isinstance(batch, Tensor) and "alone" in form
    if fits or not form or not type(task).forward.__module__.startswith("hydraloop.tasks."):
        return None
    remedy = "Let the data set return (input, target), or change the batch with data.loader.collate_fn. For other "
    remedy += "batches, give a task a method forward(batch), or use task=huggingface if they are dicts with labels."
    problem = f"a batch of it is {contents(batch)}, but {type(task).__name__} takes {form}"
    return UserError(problem, key=f"data.{split}", remedy=remedy)


# Labels. -------------------------------------------------------------------------------------------------------------


def _wrong_labels(task: Any, frames: Sequence[FrameType], split: str) -> UserError | None:
    """Return the mistake of targets that a cross entropy refuses."""
    losses = [frame.f_locals for frame in frames if frame.f_code.co_name in ("cross_entropy", "nll_loss")]
    logits, targets = (losses[0].get("input"), losses[0].get("target")) if losses else (None, None)
    if not isinstance(logits, Tensor) or not isinstance(targets, Tensor):
        return None
    shape = [*logits.shape[:1], *logits.shape[2:]] if logits.ndim > 1 else []
    if targets.is_floating_point() or [*targets.shape] != shape:
        problem = f"the targets of a batch are {described(targets)}, but the loss takes classes, int64 {shape}"
        remedy = "Let the data set return the class of a sample as an int, without a dimension for it."
        return UserError(problem, key=f"data.{split}", remedy=remedy)
    return out_of_range(task, {split: targets}, logits.size(1 if logits.ndim > 1 else 0), losses[0]["ignore_index"])


def out_of_range(task: Any, found: Mapping[str, Tensor], count: int, ignored: int) -> UserError | None:
    """Return the mistake of labels that are not below the number of classes.

    Args:
        found: some labels of each split. Others are read from its first batches.
        count: classes of the model.
        ignored: the label that does not count.
    """
    for split, some in found.items():
        every = torch.cat([some.flatten().cpu(), *_labels_of(task, split)])
        labels = [label for label in sorted(set(every.tolist())) if label != ignored]
        wrong = [label for label in labels if not 0 <= label < count]
        if not wrong:
            continue
        shown = ", ".join(map(str, labels)) if len(labels) <= 12 else f"{labels[0]} to {labels[-1]}"
        problem = f"the model has {count} classes, 0 to {count - 1}, but the labels in data.{split} are {shown}"
        if wrong[0] < 0 or wrong == [255]:
            option = "task.ignore_index" if hasattr(task, "ignore_index") else "+task.loss.ignore_index"
            remedy = f"If {wrong[0]} means that there is no label: {option}={wrong[0]}. Classes begin at 0."
            return UserError(problem, key="task.model", remedy=remedy)
        keys, needed = _count_options(task, count), labels[-1] + 1
        remedy = f"Let the model have {needed} classes."
        if keys:
            remedy = f"Use {' '.join(f'{key}={needed}' for key in keys)}."
        if labels[0] > 0:
            remedy += " Classes begin at 0: if yours do not, let the data set subtract the first one."
        return UserError(problem, key=keys[0].lstrip("+") if keys else "task.model", remedy=remedy)
    return None


def _labels_of(task: Any, split: str) -> list[Tensor]:
    """Return the labels in the first batches of a split, if they can be read."""
    labels: list[Tensor] = []
    with suppress(Exception):  # of the data set; the error that is explained is another one
        for loader in sets_of(getattr(task.engine.loaders, split)).values():
            labels += [batch[1].flatten().long() for batch in first_batches(loader, 4)]
    return labels


def _count_options(task: Any, count: int) -> list[str]:
    """Return the keys to change for another number of classes; with a + if the config does not have the key."""
    found = _options_with(task, count)
    keys = [key for key in found if any(part in key.rpartition(".")[2] for part in _COUNTED)] or found
    if not keys and task.options:
        names = [name for name in inspect.signature(type(task.model)).parameters if any(map(name.count, _COUNTED))]
        keys = [f"+task.model.{name}" for name in names]
    if keys and "num_classes" in task.options and not keys[0].endswith(".num_classes"):
        return [keys[0], "task.num_classes"]
    return keys[:1]


def _options_with(task: Any, number: int) -> list[str]:
    """Return the keys of the options of the model that have a value."""
    options = flattened(task.options.get("model"), "task.model")
    return [key for key, value in options.items() if type(value) is int and value == number]


def _device_assert(task: Any) -> UserError:
    """Return what can be said of an error that a GPU reports later, and without the values."""
    count = getattr(task, "num_classes", None) or getattr(task.model, "num_classes", None)
    if isinstance(count, int):
        nothing = torch.zeros(0, dtype=torch.int64)
        ignored = getattr(task, "ignore_index", getattr(task.loss, "ignore_index", -100))
        mistake = out_of_range(task, {"train": nothing, "val": nothing}, count, ignored)
        if mistake is not None:
            return mistake
    return UserError(
        "the GPU stopped at an index that is out of range, usually a label that is not below the number of classes, or "
        "a token that is not below the size of the vocabulary",
        key="engine.device",
        remedy="Run the same command with engine.device=cpu: it names the index.",
    )


# Layers. -------------------------------------------------------------------------------------------------------------


def _wrong_input(task: Any, frames: Sequence[FrameType], error: Exception) -> UserError | None:
    """Return the mistake of a layer or a loss of torch that cannot take its input."""
    layers = [frame.f_locals for frame in frames if frame.f_code.co_name == "_call_impl"]
    layer = layers[-1].get("self") if layers else None
    if not isinstance(layer, nn.Module) or not type(layer).__module__.startswith("torch.nn."):
        return None
    given = (*layers[-1]["args"], *layers[-1]["kwargs"].values())
    if layer is task.loss and len(given) > 1:
        problem = f"{type(layer).__name__} got outputs {described(given[0])} and targets {described(given[1])}: {error}"
        remedy = "Select a loss for such targets, or change what the model or the data set returns."
        return UserError(problem, key="task.loss", remedy=remedy)
    got = given[0] if given else None
    needed = needed_input(layer, got, error) if isinstance(got, Tensor) else None
    if needed is None:
        return None
    takes, size = needed
    options = _options_with(task, size[0]) if size else []
    keys = [key for key in options if not any(part in key for part in ("class", "label"))]  # no size of an input
    remedy = "Change the layer, or what it gets."
    if size and len(keys) == 1:
        remedy = f"Use {keys[0]}={size[1]}, or change the data."
    inputs = next((each["args"][0] for each in layers if each.get("self") is task.model and each["args"]), None)
    if isinstance(inputs, Tensor) and inputs is not got:
        remedy += f" The model got {described(inputs)}."
    name = next((name for name, module in task.model.named_modules() if module is layer), "")
    what = f"its layer {name}, {layer}," if name else layer
    return UserError(f"{what} got {described(got)}, but takes {takes}", key="task.model", remedy=remedy)
