"""From the config to the task: the model with its loss and metrics."""

from __future__ import annotations

from typing import cast

from omegaconf import DictConfig
from torch import nn

from hydraloop.errors import UserError
from hydraloop.safety.instantiate import instantiate
from hydraloop.tasks.task import Task


def build_task(cfg: DictConfig) -> Task:
    """Return the task that the config describes, on the CPU.

    Raises:
        UserError: the task, its model, loss or metrics; names the key.
    """
    task = instantiate(cfg.task, "task")
    if not isinstance(task, nn.Module):
        raise UserError(
            f"{type(task).__name__} is not a task", key="task._target_", remedy="Inherit from hydraloop.tasks.Task."
        )
    return cast(Task, task)
