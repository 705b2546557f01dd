"""Runner: the `runner` that hooks of MMEngine receive, with its message hub."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hydraloop.compat.adapter import adapters
from hydraloop.compat.stand_in import Context, StandIn

log = logging.getLogger("hydraloop.compat.mmengine")


class MessageHub(StandIn):
    """The hub that the adapted hooks of an engine share. No host sync.

    Scalars go into the records under their own names, as means since the last record. Those under `val/` and `test/`
    stay in the hub, and those with a name that hydraloop uses (`epoch`, `loss`, …) become `<hook>/<name>`.

    The hub also has `train/<name>` for the outputs of the last iteration (if a hook uses after_train_iter), `train/lr`
    and `val/<metric>` as scalars, and epoch, iter, max_epochs and max_iters as information. `resumed` has no effect:
    the hub is not saved.
    """

    STANDS_FOR = "mmengine's runner.message_hub"

    def __init__(self, context: Context) -> None:
        super().__init__(context, _scalars={}, _info={}, _outputs={})

    def keep_outputs(self, outputs: Mapping[str, Any]) -> None:
        """Keep the outputs of the last iteration for `get_scalar`."""
        self.__dict__["_outputs"] = outputs

    def update_scalar(self, key: str, value: Any, count: int = 1, resumed: bool = True) -> None:
        """Set a number or scalar tensor. A tensor stays on its device.

        Args:
            count: number of values that it is the sum of. A record has the sum of the values divided by the sum of
                their counts, as in mmengine; `get_scalar(key).current()` is the value itself.
        """
        if isinstance(value, Mapping):
            value, count = value["value"], value.get("count", 1)
        if count < 1:
            raise self.context.no_counterpart(f"count={count} of {self.STANDS_FOR}.update_scalar")
        value = value.detach().reshape(()) if isinstance(value, Tensor) else float(value)
        self._scalars[key] = value
        if not key.startswith(("val/", "test/")):
            self.context.add(key, value, int(count))

    def update_scalars(self, log_dict: Mapping[str, Any], resumed: bool = True) -> None:
        """Set several scalars."""
        for key, value in log_dict.items():
            self.update_scalar(key, value)

    def get_scalar(self, key: str) -> StandIn:
        """Return a scalar. Its last value is `get_scalar(key).current()`, which synchronizes if it is on a device.

        Raises:
            KeyError: the hub does not have this scalar.
        """
        engine = self._engine
        found: dict[str, Any] = {f"train/{name}": value for name, value in self._outputs.items() if _is_scalar(value)}
        for name, optimizer in engine.optimizers.items():
            found[f"train/{name}.lr" if name else "train/lr"] = optimizer.param_groups[0]["lr"]
        found.update((f"val/{name}", value) for name, value in engine.metrics.items())
        found.update(self._scalars)
        if key not in found:
            raise KeyError(f"{key} is not in the message hub; it has {', '.join(sorted(found))}")
        return StandIn(self.context, STANDS_FOR="mmengine's HistoryBuffer", current=lambda: float(found[key]))

    def update_info(self, key: str, value: Any, resumed: bool = True) -> None:
        """Set any value, for the other adapted hooks."""
        self._info[key] = value

    def update_info_dict(self, info_dict: Mapping[str, Any], resumed: bool = True) -> None:
        """Set several values."""
        self._info.update(info_dict)

    def get_info(self, key: str, default: Any = None) -> Any:
        """Return a value, or `default`."""
        return self.runtime_info.get(key, default)

    def pop_info(self, key: str, default: Any = None) -> Any:
        """Remove and return a value."""
        return self._info.pop(key, default)

    @property
    def runtime_info(self) -> dict[str, Any]:
        """All values, with the run's epoch and iteration."""
        engine = self._engine
        return {
            "epoch": engine.progress.epoch,
            "iter": engine.progress.iteration,
            "max_epochs": engine.max_epochs,
            "max_iters": engine.max_iters,
            **self._info,
        }


def _is_scalar(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float)


class OptimWrapper(StandIn):
    """The optimizer; with several, all of them, as MMEngine's OptimWrapperDict. Only the engine steps it."""

    STANDS_FOR = "mmengine's runner.optim_wrapper"
    ATTRIBUTES: Mapping[str, Callable[[OptimWrapper], Any]] = {
        "optimizer": lambda wrapper: wrapper._engine.optimizer,
        "param_groups": lambda wrapper: wrapper._engine.optimizer.param_groups,
    }

    def get_lr(self) -> dict[str, list[float]]:
        """Return `{"lr": [one for each group]}`; with several optimizers `{"generator.lr": […], …}`."""
        return self._by_name("lr", lambda group: group["lr"])

    def get_momentum(self) -> dict[str, list[float]]:
        """Return `{"momentum": [one for each group]}`: Adam's first beta, 0 without momentum. Names: as `get_lr`."""
        return self._by_name("momentum", lambda group: group.get("momentum", group.get("betas", (0,))[0]))

    def _by_name(self, what: str, read: Callable[[dict[str, Any]], float]) -> dict[str, list[float]]:
        return {
            f"{name}.{what}" if name else what: [read(group) for group in optimizer.param_groups]
            for name, optimizer in self._engine.optimizers.items()
        }


_COUNTERS: Mapping[str, Callable[[StandIn], Any]] = {
    # MMEngine counts an iteration after after_train_iter, hydraloop before it. The same holds for epochs.
    "iter": lambda it: it._engine.progress.iteration - (it.context.caller.method == "after_train_iter"),
    "epoch": lambda it: it._engine.progress.epoch - (it.context.caller.method == "after_train_epoch"),
    "max_iters": lambda it: it._engine.max_iters,
    "max_epochs": lambda it: it._engine.max_epochs,
    "val_interval": lambda it: it._engine.settings.val_interval,
    "val_begin": lambda it: it._engine.settings.val_begin,
}


class TrainLoop(StandIn):
    """`train_loop`."""

    STANDS_FOR = "mmengine's runner.train_loop"
    ATTRIBUTES = _COUNTERS

    @property
    def stop_training(self) -> bool:
        """Whether training stops. Setting it to True requests a stop; a request cannot be taken back."""
        return self.context.stopping

    @stop_training.setter
    def stop_training(self, stop: bool) -> None:
        self.context.set_stopping(stop, "train_loop.stop_training")


class Runner(StandIn):
    """The runner."""

    STANDS_FOR = "mmengine's runner"
    ATTRIBUTES: Mapping[str, Callable[[Runner], Any]] = {
        **_COUNTERS,
        "model": lambda runner: runner._engine.model,
        "train_dataloader": lambda runner: runner._engine.loaders.train,
        "val_dataloader": lambda runner: runner._engine.loaders.val,
        "test_dataloader": lambda runner: runner._engine.loaders.test,
        "hooks": lambda runner: [hook.wrapped for hook in adapters(runner._engine, Runner)],
        "work_dir": lambda runner: str(runner._engine.run_dir),
        "log_dir": lambda runner: str(runner._engine.run_dir),
        "experiment_name": lambda runner: str(
            runner._engine.settings.metadata.get("experiment_name", runner._engine.run_dir.name)
        ),
        "seed": lambda runner: runner._engine.seed,
        "rank": lambda runner: runner._engine.distributed.rank,
        "world_size": lambda runner: runner._engine.distributed.world_size,
        "distributed": lambda runner: runner._engine.distributed.world_size > 1,
    }
    INSTEAD = {
        "param_schedulers": "The group scheduler has the schedules; default_hooks.param_scheduler steps them.",
        "visualizer": "hooks=visualization writes pictures; numbers go to message_hub.update_scalar.",
        "log_processor": "default_hooks.logger makes the records.",
        "cfg": "The config is in <work_dir>/.hydra; give the hook the options it needs.",
        "val_evaluator": "task.metrics are the metrics.",
        "test_evaluator": "task.metrics are the metrics.",
    }

    def __init__(self, context: Context) -> None:
        loaders = context.engine.loaders
        super().__init__(
            context,
            message_hub=MessageHub(context),
            optim_wrapper=OptimWrapper(context),
            train_loop=TrainLoop(context, dataloader=loaders.train),
            val_loop=StandIn(context, STANDS_FOR="mmengine's runner.val_loop", dataloader=loaders.val),
            test_loop=StandIn(context, STANDS_FOR="mmengine's runner.test_loop", dataloader=loaders.test),
            logger=log,
        )

    def save_checkpoint(
        self, out_dir: str, filename: str, save_optimizer: bool = True, save_param_scheduler: bool = True, **other: Any
    ) -> None:
        """Request a checkpoint in hydraloop's format, written after this mount point. All ranks must call it.

        Of mmengine's other arguments, `by_epoch` has no effect, and the rest must be None.

        Raises:
            NoCounterpartError: another argument is given, or it is called in after_run or before_save_checkpoint.
        """
        what = f"{self.STANDS_FOR}.save_checkpoint"
        for name, value in other.items():
            if value is not None and name != "by_epoch":
                raise self.context.no_counterpart(f"{name} of {what}")
        path = Path(out_dir) / filename
        self.context.request_checkpoint(what, path, optimizer=save_optimizer, schedulers=save_param_scheduler)
