"""Trainer and Module: the `trainer` and `pl_module` that callbacks of Lightning receive."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim

from hydraloop.compat.adapter import adapters
from hydraloop.compat.stand_in import Context, StandIn
from hydraloop.engine.loaders import sets_of


class State(StandIn):
    """`trainer.state`: fn is "fit", "validate" or "test", stage is "train", "validate" or "test"; or both are None."""

    STANDS_FOR = "lightning's trainer.state"
    ATTRIBUTES: Mapping[str, Callable[[State], Any]] = {
        "status": lambda state: "running" if state._engine.error is None else "interrupted"
    }

    def becomes(self, **changed: str | None) -> None:
        """Change fn, stage or both. For the adapter."""
        self.__dict__.update(changed)


class Strategy(StandIn):
    """`trainer.strategy`. All ranks must call each method."""

    STANDS_FOR = "lightning's trainer.strategy"
    ATTRIBUTES: Mapping[str, Callable[[Strategy], Any]] = {"root_device": lambda strategy: strategy._engine.device}

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002  # Lightning's name
        """Return whether all ranks (with all=False, any rank) decide True."""
        decisions = self._engine.distributed.gather(bool(decision))
        return sum(decisions) == len(decisions) if all else any(decisions)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank 0's plain value."""
        if src != 0:
            raise self.context.no_counterpart(f"{self.STANDS_FOR}.broadcast from rank {src}")
        return self._engine.distributed.from_main(obj)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        self._engine.distributed.barrier()


class Logger(StandIn):
    """`trainer.logger`: adds numbers to hydraloop's records, which go to the file, the terminal and all trackers."""

    STANDS_FOR = "lightning's trainer.logger"

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add scalars to the next record, which has their means. `step` has no effect."""
        for name, value in metrics.items():
            self.context.add(name, value.detach().reshape(()) if isinstance(value, Tensor) else float(value))


class Module(StandIn):
    """`pl_module`: has every public attribute of the task (`model`, `parameters()`, `train()`, `loss`, …).

    Calling it calls the model. It is not an instance of `nn.Module` or `LightningModule`; `pl_module.model` is the
    model. Attributes that the task has can be set, except modules and parameters.
    """

    STANDS_FOR = "lightning's pl_module"
    ATTRIBUTES: Mapping[str, Callable[[Module], Any]] = {
        "device": lambda module: module._engine.device,
        "current_epoch": lambda module: module.trainer.current_epoch,
        "global_step": lambda module: module.trainer.global_step,
        "global_rank": lambda module: module.trainer.global_rank,
        "logger": lambda module: module.trainer.logger,
        "automatic_optimization": lambda module: True,
        "forward": lambda module: module._engine.model,
    }
    trainer: Trainer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._engine.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name not in self.ATTRIBUTES and hasattr(self._engine.task, name):
            return getattr(self._engine.task, name)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        task = self._engine.task
        modules = (nn.Module, nn.Parameter)
        if not name.startswith("_") and hasattr(task, name) and not isinstance(getattr(task, name), modules):
            setattr(task, name, value)
        else:
            super().__setattr__(name, value)

    def optimizers(self) -> optim.Optimizer | list[optim.Optimizer]:
        """Return the optimizer, or a list of several, as Lightning does."""
        found = list(self._engine.optimizers.values())
        return found[0] if len(found) == 1 else found

    def log(self, name: str, value: float | Tensor, **options: Any) -> None:
        """Add a scalar to `callback_metrics` and, in training, to the next record, which has its mean over all ranks.

        A name that hydraloop uses (`epoch`, `loss`, …) is `<hook>/<name>` in the records. Lightning's options
        (on_step, prog_bar, sync_dist, …) have no effect.
        """
        scalar = value.detach().reshape(()) if isinstance(value, Tensor) else float(value)
        self.trainer.callback_metrics[name] = torch.as_tensor(scalar)
        if self.trainer.training:
            self.context.add(name, scalar)

    def log_dict(self, dictionary: Mapping[str, float | Tensor], **options: Any) -> None:
        """Call `log` for each entry."""
        for name, value in dictionary.items():
            self.log(name, value, **options)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0."""
        if self._engine.distributed.is_main:
            print(*args, **kwargs)


def _is_last_batch(trainer: Trainer) -> bool:
    within = trainer.context.caller.method in ("on_train_batch_start", "on_after_backward", "on_before_optimizer_step")
    return trainer._engine.progress.batch_in_epoch + within >= trainer._engine.epoch_length


def _current_epoch(trainer: Trainer) -> int:
    """Epochs completed before this one. In Lightning, an epoch ends after its validation and on_train_epoch_end."""
    progress = trainer._engine.progress
    after_an_epoch = progress.batch_in_epoch == 0 and progress.epoch > 0 and trainer.state.fn == "fit"
    not_ended = trainer.validating or trainer.context.caller.method in ("on_train_epoch_end", "on_save_checkpoint")
    return progress.epoch - (after_an_epoch and not_ended)


def _lengths(trainer: Trainer, split: str) -> list[int]:
    loaders = sets_of(getattr(trainer._engine.loaders, split))
    return [trainer._engine.settings.limited(split, len(loader)) for loader in loaders.values()]


def _max_steps(trainer: Trainer) -> int:
    """Optimizer steps if the length of the run is set in iterations, rounded up; -1 if it is set in epochs."""
    iterations = trainer._engine.settings.max_iters
    return -1 if iterations is None else -(-iterations // trainer._engine.accumulate)


def _val_intervals(trainer: Trainer) -> tuple[int | None, int | float | None]:
    """`check_val_every_n_epoch` and `val_check_interval`."""
    settings = trainer._engine.settings
    return (settings.val_interval, 1.0) if settings.val_by_epoch else (None, settings.val_interval)


class Trainer(StandIn):
    """The trainer.

    `callback_metrics` has scalar tensors: the metrics of the last validation by their names and with the prefix `val_`
    (`accuracy`, `val_accuracy`), those of the test with `test_`, and values from `pl_module.log`.
    """

    STANDS_FOR = "lightning's trainer"
    ATTRIBUTES: Mapping[str, Callable[[Trainer], Any]] = {
        "global_step": lambda trainer: trainer._engine.progress.optimizer_step,
        "current_epoch": _current_epoch,
        "max_epochs": lambda trainer: trainer._engine.max_epochs,
        "max_steps": _max_steps,
        "num_training_batches": lambda trainer: trainer._engine.epoch_length,
        "num_val_batches": lambda trainer: _lengths(trainer, "val"),
        "num_test_batches": lambda trainer: _lengths(trainer, "test"),
        "is_last_batch": _is_last_batch,
        "training": lambda trainer: trainer.state.stage == "train",
        "validating": lambda trainer: trainer.state.stage == "validate",
        "testing": lambda trainer: trainer.state.stage == "test",
        "evaluating": lambda trainer: trainer.state.stage in ("validate", "test"),
        "predicting": lambda trainer: False,
        "sanity_checking": lambda trainer: False,
        "fast_dev_run": lambda trainer: False,
        "model": lambda trainer: trainer.lightning_module,
        "optimizers": lambda trainer: list(trainer._engine.optimizers.values()),
        "train_dataloader": lambda trainer: trainer._engine.loaders.train,
        "val_dataloaders": lambda trainer: trainer._engine.loaders.val,
        "test_dataloaders": lambda trainer: trainer._engine.loaders.test,
        "callbacks": lambda trainer: [hook.wrapped for hook in adapters(trainer._engine, Trainer)],
        "loggers": lambda trainer: [trainer.logger],
        "logged_metrics": lambda trainer: trainer.callback_metrics,
        "default_root_dir": lambda trainer: str(trainer._engine.run_dir),
        "log_dir": lambda trainer: str(trainer._engine.run_dir),
        "is_global_zero": lambda trainer: trainer._engine.distributed.is_main,
        "global_rank": lambda trainer: trainer._engine.distributed.rank,
        "local_rank": lambda trainer: trainer._engine.distributed.local_rank,
        "world_size": lambda trainer: trainer._engine.distributed.world_size,
        "accumulate_grad_batches": lambda trainer: trainer._engine.accumulate,
        "check_val_every_n_epoch": lambda trainer: _val_intervals(trainer)[0],
        "val_check_interval": lambda trainer: _val_intervals(trainer)[1],
    }
    INSTEAD = {
        "lr_scheduler_configs": "The group scheduler has the schedules; trainer.optimizers has the learning rates.",
        "checkpoint_callback": "default_hooks.checkpoint writes the checkpoints.",
        "datamodule": "trainer.train_dataloader and the like are the loaders.",
        "fit": "engine.train() trains.",
    }

    def __init__(self, context: Context) -> None:
        super().__init__(
            context,
            state=State(context, fn=None, stage=None),
            strategy=Strategy(context),
            logger=Logger(context),
            callback_metrics={},
            lightning_module=Module(context, trainer=self),
        )

    @property
    def should_stop(self) -> bool:
        """Whether training stops. Setting it to True requests a stop; a request cannot be taken back."""
        return self.context.stopping

    @should_stop.setter
    def should_stop(self, stop: bool) -> None:
        self.context.set_stopping(stop, "trainer.should_stop")

    def add_metrics(self, metrics: Mapping[str, float], *prefixes: str) -> None:
        """Add an evaluation's metrics to `callback_metrics`, once for each prefix. For the adapter."""
        for prefix in prefixes:
            self.callback_metrics.update((f"{prefix}{name}", torch.tensor(value)) for name, value in metrics.items())

    def save_checkpoint(self, filepath: str | Path, weights_only: bool = False) -> None:
        """Request a checkpoint in hydraloop's format, written after this mount point. All ranks must call it."""
        what, whole = f"{self.STANDS_FOR}.save_checkpoint", not weights_only
        self.context.request_checkpoint(what, Path(filepath), optimizer=whole, schedulers=whole)
