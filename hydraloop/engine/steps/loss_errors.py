"""What is wrong with the loss that a task has returned."""

from __future__ import annotations

from typing import Any

from hydraloop.errors import UserError


def no_loss_error(task: Any, outputs: Any, step: str = "") -> UserError:
    """Return the error of a task whose output has no loss."""
    got = f"a dict with {sorted(map(str, outputs))}" if isinstance(outputs, dict) else f"a {type(outputs).__name__}"
    return UserError(
        f"{type(task).__name__}.forward returned {got}, without a 'loss'{f', for the step {step!r}' if step else ''}",
        key="task",
        remedy='Return a dict with the scalar to minimise: {"loss": loss}.',
    )


def wrong_loss_error(loss: object) -> UserError:
    """Return the error of a task whose loss is neither a tensor nor a pair."""
    remedy = 'Return a scalar tensor, {"loss": loss}, without .item() and float().'
    return UserError(f"the loss is a {type(loss).__name__}, not a tensor", key="task", remedy=remedy)


def counted_mean_error() -> UserError:
    """Return the error of a task that counts the terms of its loss and returns their mean."""
    return UserError(
        "the task has a method count, and its loss is a mean over an unknown number of terms",
        key="task",
        remedy='Return the sum of the losses and the number of count, {"loss": (sum, count)}, or remove count.',
    )


def wrong_count_error(counted: float, returned: float) -> UserError:
    """Return the error of a task whose count is not that of its loss."""
    return UserError(
        f"count returned {counted:g} for the first batches, and forward returned losses of {returned:g} terms",
        key="task",
        remedy="Return the same number from count as with the loss, or remove count.",
    )


def no_gradient_error(step: str) -> UserError:
    """Return the error of a step whose loss depends on no parameter of its optimizer."""
    return UserError(
        f"the loss of the step {step!r} does not depend on the parameters of optimizer.{step}",
        key="task",
        remedy="Compute it with these parameters, without detach() and no_grad(), or exchange the names of the steps.",
    )
