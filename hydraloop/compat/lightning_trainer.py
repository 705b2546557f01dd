"""Trainer: what a callback of Lightning is given as `trainer`, on the engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, optim

from hydraloop.compat.adapter import adapted
from hydraloop.compat.facade import Context, Facade
from hydraloop.compat.lightning_module import Module
from hydraloop.engine.inputs import Loader


class State(Facade):
    """`trainer.state`: fn is "fit", "validate" or "test", stage "train", "validate" or "test"."""

    STANDS_FOR = "lightning's trainer.state"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.becomes(fn=None, stage=None)

    def becomes(self, **what: str | None) -> None:
        """For the adapter: fn or stage, or both, change."""
        self.__dict__.update(what)

    fn: str | None
    """What is done: training with its validations is "fit"."""
    stage: str | None
    """Which loop is going on."""

    @property
    def status(self) -> str:
        """running, or interrupted after an error."""
        return "running" if self._engine.error is None else "interrupted"


class Strategy(Facade):
    """`trainer.strategy`: what all ranks decide together. Each method is called on every rank."""

    STANDS_FOR = "lightning's trainer.strategy"

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        return self._engine.device

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002  # Lightning's name
        """Whether all ranks, or with all=False at least one, say so."""
        said = self._engine.distributed.gather(bool(decision))
        return sum(said) == len(said) if all else any(said)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Rank 0's plain value."""
        if src != 0:
            raise self.context.no_counterpart(f"{self.STANDS_FOR}.broadcast from rank {src}")
        return self._engine.distributed.from_main(obj)

    def barrier(self, name: str | None = None) -> None:
        """Wait until all ranks are here."""
        self._engine.distributed.barrier()


class Logger(Facade):
    """`trainer.logger`: numbers for hydraloop's records, which go to the file, the terminal and all trackers."""

    STANDS_FOR = "lightning's trainer.logger"

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Put scalars into the next record, averaged since the last one; `step` is the record's own."""
        for name, value in metrics.items():
            self.context.add(name, value.detach().reshape(()) if isinstance(value, Tensor) else float(value))


class Trainer(Facade):
    """The trainer."""

    STANDS_FOR = "lightning's trainer"
    INSTEAD = {
        "lr_scheduler_configs": "The group scheduler has the schedules; trainer.optimizers has the learning rates.",
        "checkpoint_callback": "default_hooks.checkpoint writes the checkpoints.",
        "datamodule": "trainer.train_dataloader and the like are the loaders.",
        "fit": "engine.train() trains.",
    }

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.__dict__.update(
            state=State(context),
            strategy=Strategy(context),
            logger=Logger(context),
            callback_metrics={},
            lightning_module=Module(context, self),
        )

    context: Context
    state: State
    """See `State`."""
    strategy: Strategy
    """See `Strategy`."""
    logger: Logger
    """See `Logger`."""
    callback_metrics: dict[str, Any]
    """Scalar tensors: of the last validation by their names here and with `val_` in front (`accuracy`,
    `val_accuracy`), of the test with `test_`, and what `pl_module.log` was given."""
    lightning_module: Module
    """See `Module`."""

    def take(self, metrics: Mapping[str, float], *prefixes: str) -> None:
        """Take an evaluation's metrics over into `callback_metrics`, under their names behind each prefix."""
        for prefix in prefixes:
            self.callback_metrics.update((f"{prefix}{name}", torch.tensor(value)) for name, value in metrics.items())

    # Where the run stands. -----------------------------------------------------------------------------------------

    @property
    def global_step(self) -> int:
        """Optimizer steps completed."""
        return self._engine.progress.optimizer_step

    @property
    def current_epoch(self) -> int:
        """Epochs completed before this one; an epoch is over behind its validation and on_train_epoch_end."""
        progress = self._engine.progress
        behind_an_epoch = progress.batch_in_epoch == 0 and progress.epoch > 0 and self.state.fn == "fit"
        within = self.validating or self.context.point in ("on_train_epoch_end", "on_save_checkpoint")
        return progress.epoch - (behind_an_epoch and within)

    @property
    def max_epochs(self) -> int:
        """Epochs of the whole run."""
        return self._engine.max_epochs

    @property
    def max_steps(self) -> int:
        """Optimizer steps of a run that is given in iterations, rounded up; -1 for one that is given in epochs."""
        iterations = self._engine.settings.max_iters
        return -1 if iterations is None else -(-iterations // self._engine.accumulate)

    @property
    def num_training_batches(self) -> int:
        """Iterations in an epoch."""
        return self._engine.epoch_length

    @property
    def num_val_batches(self) -> list[int]:
        """Batches of a validation."""
        return _lengths(self._engine.loaders.val)

    @property
    def num_test_batches(self) -> list[int]:
        """Batches of a test."""
        return _lengths(self._engine.loaders.test)

    @property
    def is_last_batch(self) -> bool:
        """Whether this is the epoch's last batch."""
        within = self.context.point in ("on_train_batch_start", "on_after_backward", "on_before_optimizer_step")
        return self._engine.progress.batch_in_epoch + within >= self._engine.epoch_length

    @property
    def training(self) -> bool:
        """Whether the train loop is going on."""
        return self.state.stage == "train"

    @property
    def validating(self) -> bool:
        """Whether a validation is going on, in training too."""
        return self.state.stage == "validate"

    @property
    def testing(self) -> bool:
        """Whether a test is going on."""
        return self.state.stage == "test"

    @property
    def evaluating(self) -> bool:
        """Whether a validation or test is going on."""
        return self.validating or self.testing

    @property
    def predicting(self) -> bool:
        """Never."""
        return False

    @property
    def sanity_checking(self) -> bool:
        """Never: there is no sanity check."""
        return False

    @property
    def should_stop(self) -> bool:
        """Whether training stops; True asks the engine to stop, False does not take that back."""
        return self.context.stop_asked or self._engine.stopping

    @should_stop.setter
    def should_stop(self, stop: bool) -> None:
        if stop:
            self.context.stop("trainer.should_stop")
        elif self.should_stop:
            raise self.context.no_counterpart("taking back trainer.should_stop")

    # What it has. --------------------------------------------------------------------------------------------------

    @property
    def model(self) -> Module:
        """The same as `pl_module`."""
        return self.lightning_module

    @property
    def optimizers(self) -> list[optim.Optimizer]:
        """The optimizer, whose groups may be changed."""
        return [self._engine.optimizer]

    @property
    def train_dataloader(self) -> Loader | None:
        """The train loader."""
        return self._engine.loaders.train

    @property
    def val_dataloaders(self) -> Loader | None:
        """The validation loader."""
        return self._engine.loaders.val

    @property
    def test_dataloaders(self) -> Loader | None:
        """The test loader."""
        return self._engine.loaders.test

    @property
    def callbacks(self) -> list[Any]:
        """The adapted callbacks."""
        return adapted(self._engine, "lightning")

    @property
    def loggers(self) -> list[Logger]:
        """`[logger]`."""
        return [self.logger]

    @property
    def logged_metrics(self) -> dict[str, Any]:
        """The same as `callback_metrics`."""
        return self.callback_metrics

    # The run's facts. ----------------------------------------------------------------------------------------------

    @property
    def default_root_dir(self) -> str:
        """The run directory."""
        return str(self._engine.run_dir)

    @property
    def log_dir(self) -> str:
        """The run directory."""
        return str(self._engine.run_dir)

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self._engine.distributed.is_main

    @property
    def global_rank(self) -> int:
        """This process's number."""
        return self._engine.distributed.rank

    @property
    def local_rank(self) -> int:
        """Its number on this machine."""
        return self._engine.distributed.local_rank

    @property
    def world_size(self) -> int:
        """How many processes train together."""
        return self._engine.distributed.world_size

    @property
    def accumulate_grad_batches(self) -> int:
        """Iterations in an optimizer step."""
        return self._engine.accumulate

    @property
    def check_val_every_n_epoch(self) -> int | None:
        """Epochs between validations; None where they are counted in iterations."""
        settings = self._engine.settings
        return settings.val_interval if settings.val_by_epoch else None

    @property
    def val_check_interval(self) -> int | float | None:
        """1.0 where validations are counted in epochs, else iterations between them."""
        settings = self._engine.settings
        return 1.0 if settings.val_by_epoch else settings.val_interval

    @property
    def fast_dev_run(self) -> bool:
        """Never."""
        return False

    def save_checkpoint(self, filepath: str | Path, weights_only: bool = False) -> None:
        """Ask for a checkpoint, in hydraloop's format, written once this mount point is over. On every rank.

        Not in teardown, on_exception and on_save_checkpoint.
        """
        what, whole = f"{self.STANDS_FOR}.save_checkpoint", not weights_only
        self.context.request_checkpoint(what, Path(filepath), optimizer=whole, schedulers=whole)


def _lengths(loader: Loader | None) -> list[int]:
    return [] if loader is None else [len(loader)]
