"""From the config to the task, the model with its loss and metrics, and its preparation for training."""

from __future__ import annotations

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from hydraloop.engine.device.model_preparation import (
    WRAP,
    checkpoint_activations,
    compile_modules,
    modules_of,
    use_channels_last,
)
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.stepping.steps import check_sharding
from hydraloop.errors import UserError
from hydraloop.safety.allowlist import ALLOWLIST
from hydraloop.safety.instantiate import instantiate
from hydraloop.tasks.task import Task


def build_task(cfg: DictConfig) -> Task:
    """Return the task that the config describes, on the CPU.

    Raises:
        UserError: the task, its model, loss or metrics; names the key.
    """
    target = cfg.task.get("_target_") if isinstance(cfg.task, DictConfig) else None
    if isinstance(target, str):
        found = ALLOWLIST.locate(target, "task")
        if isinstance(found, type) and issubclass(found, nn.Module) and not issubclass(found, Task):
            raise UserError(
                f"{found.__name__} is a model, not a task",
                key="task._target_",
                remedy=f"Use it in a task: '~model' +task.model._target_={target}. Or inherit from hydraloop.Task.",
            )
    task = instantiate(cfg.task, "task")
    if not isinstance(task, Task):
        raise UserError(
            f"{type(task).__name__} is not a task", key="task._target_", remedy="Inherit from hydraloop.Task."
        )
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
    distributed.prepare(task.model)  # gives their classes other names
    options = cfg.engine.compile
    if isinstance(options, DictConfig):
        options = OmegaConf.to_container(options, resolve=True)
    compile_modules(blocks or [task.model], options)
    return channels_last
