"""From the config to the task, the model with its loss and metrics, and its preparation for training."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, cast

import torch
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import nn

from hydraloop.engine.device.model_preparation import (
    WRAP,
    checkpoint_activations,
    compile_modules,
    modules_of,
    use_channels_last,
    uses_cuda_graphs,
)
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.steps.task_steps import check_sharding
from hydraloop.errors import UserError
from hydraloop.safety.instantiate import instantiate
from hydraloop.schemas.task import no_model
from hydraloop.tasks.task import Task


def build_task(cfg: DictConfig, given: nn.Module | None = None) -> Task:
    """Return the given task, or the one that the config describes, on the CPU. A given model is that of the task.

    Raises:
        UserError: the task, its model, loss or metrics; names the key.
    """
    if given is None and isinstance(cfg.task, DictConfig) and OmegaConf.is_missing(cfg.task, "model"):
        raise no_model()
    task: object = instantiate(cfg.task, "task") if given is None else given
    if isinstance(given, nn.Module) and not isinstance(given, Task):
        task = _with_model(cfg.task, given)
    if not isinstance(task, Task):
        raise UserError(
            f"{type(task).__name__} is not a task",
            key="task" if given else "task._target_",
            remedy="Inherit from hydraloop.Task, or use it as the model of a task: '~model' +task.model._target_=….",
        )
    if given is None:
        task.options = cast("Mapping[str, Any]", OmegaConf.to_container(cfg.task, resolve=True))
    return task


def _with_model(node: DictConfig, model: nn.Module) -> Task:
    node = copy.deepcopy(node)  # keeps the parent, for interpolations
    with open_dict(node):
        node.pop("model", None)
        node._partial_ = True
    task: Task = instantiate(node, "task")(model=model)
    return task


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
