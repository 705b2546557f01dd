"""Runner: what a hook of MMEngine is given as `runner`, on the engine."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from torch import nn, optim

from hydraloop.compat.adapter import adapted
from hydraloop.compat.facade import Context, Facade
from hydraloop.compat.message_hub import MessageHub
from hydraloop.engine.inputs import Loader

_SCHEDULES = "The group scheduler has the schedules; default_hooks.param_scheduler steps them."
_PICTURES = "hooks=visualization writes pictures; numbers go to message_hub.update_scalar."


class OptimWrapper(Facade):
    """The optimizer; stepping it is the engine's."""

    STANDS_FOR = "mmengine's runner.optim_wrapper"

    @property
    def optimizer(self) -> optim.Optimizer:
        """torch's optimizer itself."""
        return self._engine.optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Its groups, which may be changed (`group["lr"] = …`)."""
        return self._engine.optimizer.param_groups

    def get_lr(self) -> dict[str, list[float]]:
        """`{"lr": one for each group}`."""
        return {"lr": [group["lr"] for group in self.param_groups]}

    def get_momentum(self) -> dict[str, list[float]]:
        """`{"momentum": one for each group}`; Adam's first beta, 0 where there is none."""
        return {"momentum": [group.get("momentum", group.get("betas", (0,))[0]) for group in self.param_groups]}


class Loop(Facade):
    """A loop over a loader: `val_loop`, `test_loop`."""

    def __init__(self, context: Context, split: str) -> None:
        super().__init__(context)
        self.__dict__.update(_split=split, STANDS_FOR=f"mmengine's runner.{split}_loop")

    @property
    def dataloader(self) -> Loader | None:
        """What it goes over."""
        loader: Loader | None = getattr(self._engine.loaders, self._split)
        return loader


class Standing(Facade):
    """Where training stands, as MMEngine counts: from 0, the current epoch or iteration not included."""

    @property
    def iter(self) -> int:
        """Iterations completed before this one: in after_train_iter the current one is not counted yet."""
        return _iteration(self.context)

    @property
    def epoch(self) -> int:
        """Epochs completed before this one: in after_train_epoch the current one is not counted yet."""
        return _epoch(self.context)

    @property
    def max_iters(self) -> int:
        """Iterations of the whole run."""
        return self._engine.max_iters

    @property
    def max_epochs(self) -> int:
        """Epochs of the whole run."""
        return self._engine.max_epochs

    @property
    def val_interval(self) -> int | None:
        """Epochs, or iterations, between validations."""
        return self._engine.settings.val_interval

    @property
    def val_begin(self) -> int:
        """The first epoch, or iteration, with a validation."""
        return self._engine.settings.val_begin


class TrainLoop(Standing, Loop):
    """`train_loop`: also where training stands and whether it goes on."""

    def __init__(self, context: Context) -> None:
        Loop.__init__(self, context, "train")

    @property
    def stop_training(self) -> bool:
        """Whether training stops; True asks the engine to stop, False does not take that back."""
        return self.context.stop_asked or self._engine.stopping

    @stop_training.setter
    def stop_training(self, stop: bool) -> None:
        if stop:
            self.context.stop("train_loop.stop_training")
        elif self.stop_training:
            raise self.context.no_counterpart("taking back train_loop.stop_training")


class Runner(Standing):
    """The runner."""

    STANDS_FOR = "mmengine's runner"
    INSTEAD = {
        "param_schedulers": _SCHEDULES,
        "visualizer": _PICTURES,
        "log_processor": "default_hooks.logger makes the records.",
        "cfg": "The config is in <work_dir>/.hydra; give the hook the options it needs.",
        "val_evaluator": "task.metrics are the metrics.",
        "test_evaluator": "task.metrics are the metrics.",
    }

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.__dict__.update(
            message_hub=MessageHub(context),
            optim_wrapper=OptimWrapper(context),
            train_loop=TrainLoop(context),
            val_loop=Loop(context, "val"),
            test_loop=Loop(context, "test"),
            logger=logging.getLogger("hydraloop.compat.mmengine"),
        )

    context: Context
    message_hub: MessageHub
    """See `MessageHub`."""
    optim_wrapper: OptimWrapper
    """See `OptimWrapper`."""
    train_loop: TrainLoop
    """See `TrainLoop`."""
    val_loop: Loop
    """See `Loop`."""
    test_loop: Loop
    """See `Loop`."""
    logger: logging.Logger
    """Of Python's logging; goes where hydraloop's own goes."""

    # What it has. --------------------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The raw model."""
        return self._engine.model

    @property
    def train_dataloader(self) -> Loader | None:
        """The train loader."""
        return self._engine.loaders.train

    @property
    def val_dataloader(self) -> Loader | None:
        """The validation loader."""
        return self._engine.loaders.val

    @property
    def test_dataloader(self) -> Loader | None:
        """The test loader."""
        return self._engine.loaders.test

    @property
    def hooks(self) -> list[Any]:
        """The adapted hooks, as MMEngine's objects."""
        return adapted(self._engine, "mmengine")

    # The run's facts. ----------------------------------------------------------------------------------------------

    @property
    def work_dir(self) -> str:
        """The run directory."""
        return str(self._engine.run_dir)

    @property
    def log_dir(self) -> str:
        """The run directory."""
        return str(self._engine.run_dir)

    @property
    def experiment_name(self) -> str:
        """The config's `experiment_name`; of an engine without a config, the run directory's name."""
        return str(self._engine.settings.metadata.get("experiment_name", self._engine.run_dir.name))

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self._engine.seed

    @property
    def rank(self) -> int:
        """This process's number."""
        return self._engine.distributed.rank

    @property
    def world_size(self) -> int:
        """How many processes train together."""
        return self._engine.distributed.world_size

    @property
    def distributed(self) -> bool:
        """Whether there are several."""
        return self.world_size > 1

    def save_checkpoint(
        self,
        out_dir: str,
        filename: str,
        file_client_args: None = None,
        save_optimizer: bool = True,
        save_param_scheduler: bool = True,
        meta: None = None,
        by_epoch: bool = True,
        backend_args: None = None,
    ) -> None:
        """Ask for a checkpoint, in hydraloop's format, written once this mount point is over. On every rank.

        Not in after_run and before_save_checkpoint. `by_epoch` is without meaning; of `meta` and the arguments of file
        backends only None carries over.
        """
        given = {"file_client_args": file_client_args, "meta": meta, "backend_args": backend_args}
        for name, value in given.items():
            if value is not None:
                raise self.context.no_counterpart(f"{name} of {self.STANDS_FOR}.save_checkpoint")
        what, path = f"{self.STANDS_FOR}.save_checkpoint", Path(out_dir) / filename
        self.context.request_checkpoint(what, path, optimizer=save_optimizer, schedulers=save_param_scheduler)


def _iteration(context: Context) -> int:
    # MMEngine counts an iteration behind after_train_iter, hydraloop in front of it; the same for epochs.
    return context.engine.progress.iteration - (context.point == "after_train_iter")


def _epoch(context: Context) -> int:
    return context.engine.progress.epoch - (context.point == "after_train_epoch")
