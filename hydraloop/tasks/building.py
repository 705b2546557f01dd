"""From the config to the task, the model with its loss and metrics, and its preparation for training."""

from __future__ import annotations

import copy
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import nn
from torch.nn.parameter import is_lazy

from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.model_preparation import (
    WRAP,
    checkpoint_activations,
    compile_modules,
    modules_of,
    use_channels_last,
    uses_cuda_graphs,
)
from hydraloop.engine.task_steps import check_sharding
from hydraloop.errors import UserError
from hydraloop.safety.instantiate import instantiate, locate
from hydraloop.schemas.task import no_model
from hydraloop.tasks.task import Task


def build_task(cfg: DictConfig, given: nn.Module | None = None) -> Task:
    """Return the given task, or the one that the config describes, on the CPU. A given model is that of the task.

    Raises:
        UserError: the task, its model, loss or metrics; names the key.
    """
    target = cfg.task.get("_target_") if isinstance(cfg.task, DictConfig) else None
    if isinstance(target, str) and given is None:
        found = locate(target, "task")
        if isinstance(found, type) and issubclass(found, nn.Module) and not issubclass(found, Task):
            raise UserError(
                f"{found.__name__} is a model, not a task",
                key="task._target_",
                remedy=f"Use it in a task: '~model' +task.model._target_={target}. Or inherit from hydraloop.Task.",
            )
    if given is None and target is not None and OmegaConf.is_missing(cfg.task, "model"):
        raise no_model()
    task: object = instantiate(cfg.task, "task") if given is None else given
    if isinstance(given, nn.Module) and not isinstance(given, Task):
        task = _with_model(cfg.task, given)
    if not isinstance(task, Task):
        raise UserError(
            f"{type(task).__name__} is not a task",
            key="task" if given else "task._target_",
            remedy="Inherit from hydraloop.Task.",
        )
    _check_parts(task)
    return task


def _with_model(node: DictConfig, model: nn.Module) -> Task:
    node = copy.deepcopy(node)  # keeps the parent, for interpolations
    with open_dict(node):
        node.pop("model", None)
        node._partial_ = True
    task: Task = instantiate(node, "task")(model=model)
    return task


def _check_parts(task: Task) -> None:
    """Refuse a model, a loss or a metric that is only a name, or an object of another kind."""
    model: object = task.model
    if not isinstance(model, nn.Module):
        raise UserError(f"{model!r} is not a model", key="task.model", remedy="Select one: model=small_cnn.")
    loss: object = task.loss
    if not callable(loss):
        remedy = "Name a class: task.loss._target_=torch.nn.MSELoss."
        raise UserError(f"{loss!r} is not a loss function", key="task.loss", remedy=remedy)
    for name, metric in task.metrics.items():
        missing = [method for method in ("update", "compute", "reset") if not hasattr(metric, method)]
        if missing:
            raise UserError(
                f"{type(metric).__name__} has no method {missing[0]}, so it is not a metric",
                key=f"task.metrics.{name}",
                remedy="Use a metric of hydraloop.tasks.metrics or torchmetrics, or a class with update, compute and "
                "reset.",
            )
    _check_sizes(task)


def _check_sizes(task: Task) -> None:
    """Refuse a lazy layer, whose parameters have no shape before its first batch."""
    for name, module in task.named_modules():
        tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if any(map(is_lazy, tensors)):
            raise UserError(
                f"{name or 'the task'} is a lazy layer ({type(module).__name__}): its parameters have no shape yet",
                key="task.model" if name.partition(".")[0] == "model" else "task",
                remedy="Use the layer with sizes, as in nn.Linear(64, 10) for nn.LazyLinear(10). Or call the model "
                "with one batch at the end of its __init__, as in self(torch.zeros(2, 64)).",
            )


def prepare_model(cfg: DictConfig, task: Task, device: torch.device, distributed: Distributed) -> bool:
    """Move the model to the device and wrap it for training, before the optimizer takes its parameters.

    Returns:
        Whether images are laid out channels last.
    """
    check_sharding(task, distributed)
    task.to(device)
    task.device = device
    channels_last = use_channels_last(task.model, cfg.engine.channels_last, weights=not distributed.sharded)
    checkpoint_activations(task.model, cfg.engine.activation_checkpointing)
    blocks = modules_of(task.model, cfg.distributed.fsdp.wrap, key=WRAP) if distributed.sharded else []
    options: Any = cfg.engine.compile
    if isinstance(options, DictConfig):
        options = OmegaConf.to_container(options, resolve=True)
        if uses_cuda_graphs(options) and cfg.engine.accumulate > 1:
            problem = "CUDA graphs overwrite the gradients that engine.accumulate adds up"
            remedy = "Use engine.accumulate=1, or 'engine.compile={mode: max-autotune-no-cudagraphs}'."
            raise UserError(problem, key="engine.compile", remedy=remedy)
    compile_modules(blocks or [task.model], options)
    # As torchtitan does: blocks are compiled first, then sharded.
    distributed.prepare(task.model, torch.bfloat16 if cfg.precision.name == "bf16" else None)
    return channels_last
