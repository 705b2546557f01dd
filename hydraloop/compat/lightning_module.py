"""Module: what a callback of Lightning is given as `pl_module`: the task, with Lightning's additions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn, optim

from hydraloop.compat.facade import Context, Facade

if TYPE_CHECKING:
    from hydraloop.compat.lightning_trainer import Logger, Trainer


class Module(Facade):
    """The module. Every public attribute of the task is one of it: `model`, `parameters()`, `train()`, `loss`, ….

    Calling it calls the model. It is no `nn.Module` and no `LightningModule` to `isinstance`; `pl_module.model` is the
    model itself. Attributes that the task has may be set, except modules and parameters.
    """

    STANDS_FOR = "lightning's pl_module"

    def __init__(self, context: Context, trainer: Trainer) -> None:
        super().__init__(context)
        self.__dict__["trainer"] = trainer

    trainer: Trainer
    """The trainer."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._engine.model(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        return self._engine.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(self._engine.task, name):
            return getattr(self._engine.task, name)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        task = self._engine.task
        modules = (nn.Module, nn.Parameter)
        if not name.startswith("_") and hasattr(task, name) and not isinstance(getattr(task, name), modules):
            setattr(task, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self._engine.device

    @property
    def current_epoch(self) -> int:
        """The trainer's."""
        return self.trainer.current_epoch

    @property
    def global_step(self) -> int:
        """The trainer's."""
        return self.trainer.global_step

    @property
    def global_rank(self) -> int:
        """The trainer's."""
        return self.trainer.global_rank

    @property
    def logger(self) -> Logger:
        """The trainer's."""
        return self.trainer.logger

    @property
    def automatic_optimization(self) -> bool:
        """Always: the engine steps the optimizer."""
        return True

    def optimizers(self) -> optim.Optimizer:
        """The optimizer."""
        return self._engine.optimizer

    def log(self, name: str, value: float | Tensor, **options: Any) -> None:
        """Put a scalar into `callback_metrics` and, in training, into the next record, averaged since the last one.

        A name that hydraloop's own numbers have (`epoch`, `loss`, …) is `<hook>/<name>` in the records.
        Lightning's options (on_step, prog_bar, sync_dist, …) are without meaning: a record is a mean over its
        iterations and over all ranks.
        """
        scalar = value.detach().reshape(()) if isinstance(value, Tensor) else float(value)
        self.trainer.callback_metrics[name] = torch.as_tensor(scalar)
        if self.trainer.training:
            self.context.add(name, scalar)

    def log_dict(self, dictionary: Mapping[str, float | Tensor], **options: Any) -> None:
        """`log` of each."""
        for name, value in dictionary.items():
            self.log(name, value, **options)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print, on rank 0."""
        if self._engine.distributed.is_main:
            print(*args, **kwargs)
