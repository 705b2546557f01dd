"""What is wrong with the loss that a task has returned, or with its gradients."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hydraloop.errors import UserError


def no_loss_error(task: Any, outputs: Any, step: str = "") -> UserError:
    """Return the error of a task whose output has no loss."""
    got = f"a dict with {sorted(map(str, outputs))}" if isinstance(outputs, dict) else f"a {type(outputs).__name__}"
    return UserError(
        f"{type(task).__name__}.forward returned {got}, without a 'loss'{f', for the step {step!r}' if step else ''}",
        key="task",
        remedy='Return a dict with the scalar to minimise: {"loss": loss}.',
    )


def check_loss(task: Any, loss: Any, step: str = "") -> None:
    """Refuse a loss that cannot be backpropagated. No host sync.

    Args:
        task: whose `forward` has returned the loss.
        loss: a scalar tensor, or a pair of the sum of the losses and their number.
        step: of the task, if it has steps.
    """
    total = check_form(task, loss, step)
    if total.requires_grad:
        return
    of_step = f" in the step {step!r}" if step else ""
    if not total.is_floating_point():
        raise UserError(
            f"the loss of {type(task).__name__}{of_step} is {total.dtype}, which has no gradient",
            key="task",
            remedy="Return a floating-point tensor that is computed from the model's outputs.",
        )
    which = f"optimizer.{step}" if step else "the optimizer"
    raise UserError(
        f"the loss of {type(task).__name__}{of_step} does not depend on the parameters of {which}",
        key="task",
        remedy="Compute it with these parameters, without detach() and no_grad()"
        + (", or exchange the names of the steps." if step else "."),
    )


def check_form(task: Any, loss: Any, step: str = "") -> Tensor:
    """Refuse a loss that is not a real scalar tensor or a pair (sum, count); return the tensor. No host sync.

    Args: as in `check_loss`.
    """
    total = loss if isinstance(loss, Tensor) else _sum_of(task, loss)
    if total.numel() != 1 or total.is_complex():
        of_step = f" in the step {step!r}" if step else ""
        which = "the sum in the loss" if total is not loss else "the loss"
        got = "complex" if total.is_complex() else f"a tensor of shape {list(total.shape)}, not one number"
        raise UserError(
            f"{which} of {type(task).__name__}{of_step} is {got}",
            key="task",
            remedy="Return one real number: the mean over the samples, loss.mean().",
        )
    return total


def _sum_of(task: Any, loss: Any) -> Tensor:
    """Return the first entry of a pair."""
    if not isinstance(loss, tuple | list) or len(loss) != 2 or not isinstance(loss[0], Tensor):
        is_pair = isinstance(loss, tuple | list)
        got = "not a pair (sum, count) with a tensor" if is_pair else f"a {type(loss).__name__}, not a tensor"
        raise UserError(
            f"the loss of {type(task).__name__} is {got}",
            key="task",
            remedy='Return a scalar tensor, {"loss": loss}, without .item() and float().',
        )
    total: Tensor = loss[0]
    count = loss[1]
    if count.numel() != 1 if isinstance(count, Tensor) else not isinstance(count, int | float):
        got = f"a tensor of shape {list(count.shape)}" if isinstance(count, Tensor) else f"a {type(count).__name__}"
        raise UserError(
            f"the loss of {type(task).__name__} is a pair whose second entry is {got}, not a number of losses",
            key="task",
            remedy='Return {"loss": (sum, count)}, or the loss alone: {"loss": loss}.',
        )
    return total


def two_forms_error(step: str) -> UserError:
    """Return the error of a task whose losses, which are weighted together, have two forms."""
    of_step = f" in the step {step!r}" if step else ""
    return UserError(
        f"the loss{of_step} is a mean in some batches and a pair (sum, count) in others",
        key="task",
        remedy='Return {"loss": (sum, count)} for all batches, on all ranks.',
    )


def empty_batch_error(batch_idx: int) -> UserError:
    """Return the error of a batch without samples, whose mean loss would be NaN."""
    return UserError(
        f"batch {batch_idx} (from 0) of this epoch has no samples",
        key="data.loader.collate_fn",
        remedy="Let it return at least one sample, or leave such samples out of the data set.",
    )


def sparse_error(model: nn.Module, error: BaseException) -> UserError | None:
    """Return the error of torch for sparse gradients as one message; None if `error` is another one."""
    names = [name for name, module in model.named_modules() if getattr(module, "sparse", False) is True]
    if not (names and isinstance(error, RuntimeError) and "sparse" in str(error).lower()):
        return None
    return UserError(
        f"the gradients of {', '.join(names)} are sparse: {str(error).partition('. ')[0]}",
        key="task.model",
        remedy="Use sparse=False in the model. Sparse gradients work with optimizer=adagrad, and with optimizer=sgd "
        "optimizer.weight_decay=0, if neither FSDP2 nor default_hooks.grad_clip.clip_value is used.",
    )
