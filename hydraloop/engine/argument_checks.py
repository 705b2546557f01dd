"""Checks that a task, and the methods of a hook, can be called with what the engine passes. Imports no torch."""

from __future__ import annotations

import inspect
from typing import Any

from hydraloop.engine.mount_points import HookLike
from hydraloop.errors import UserError


def check_hook(hook: object, key: str) -> None:
    """Refuse an object that is not a hook, or a mount point that does not take what the engine passes.

    Args:
        hook: the object.
        key: names its option.
    """
    if not isinstance(hook, HookLike):
        raise UserError(
            f"{type(hook).__name__} is not a Hook",
            key=key,
            remedy="Inherit from hydraloop.Hook.",
        )
    hook.check_arguments(key)


def check_task(task: Any) -> None:
    """Refuse a module that is not a task, or whose `forward` does not take a batch."""
    if not hasattr(task, "evaluate") or not hasattr(task, "metric_names"):
        raise UserError(
            f"{type(task).__name__} is not a task",
            key="task",
            remedy="Use it as the model of a task, such as hydraloop.tasks.Classification(model, loss, metrics).",
        )
    steps = getattr(task, "steps", ())
    if not isinstance(steps, tuple) or not all(isinstance(name, str) for name in steps):
        raise UserError(
            f"{type(task).__name__}.steps is {steps!r}, not a tuple with the names of steps",
            key="task",
            remedy='Write: steps = ("discriminator", "generator"), or give another name to this attribute.',
        )
    # Evaluation calls it without a step.
    for words, options in (("batch", {}), ("batch, step=…", {"step": ""})) if steps else (("batch", {}),):
        signature = refusing(task.forward, "batch", **options)
        if signature is not None:
            raise UserError(
                f"{type(task).__name__}.forward{signature} cannot be called with ({words})",
                key="task",
                remedy=f"Write: def forward(self, {'batch, step=None' if steps else 'batch'})",
            )


def refusing(function: Any, /, *args: Any, **kwargs: Any) -> inspect.Signature | None:
    """Return the signature of a function that cannot be called with these arguments; None if it can be.

    A decorated function is not looked into, because its decorator may pass other arguments.
    """
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (ValueError, TypeError):  # some builtins have none
        return None
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return signature
    return None
