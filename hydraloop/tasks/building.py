"""From the config to the task: the model with its loss and metrics."""

from __future__ import annotations

from omegaconf import DictConfig
from torch import nn

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
