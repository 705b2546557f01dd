"""Run: what a run is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypedDict

import torch
from torch import nn, optim

from hydraloop.engine.argument_checks import check_task
from hydraloop.engine.device.precision import Precision
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.mount_points import HookLike
from hydraloop.engine.optimizers.optimizer_set import parts
from hydraloop.engine.optimizers.parameter_groups import Group, describe
from hydraloop.engine.settings import Settings
from hydraloop.errors import UserError


class Schedule(Protocol):
    """What the engine needs of a schedule."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Run:
    """The parts of a run, finished objects. Which objects they are does not change."""

    task: Any
    """The task: an `nn.Module` whose forward takes a batch and returns a dict with a scalar `loss`."""
    trained_by: optim.Optimizer | None
    """The optimizer; None if the engine only evaluates."""
    schedules: Mapping[str, Schedule]
    """The schedules by name."""
    hooks: Mapping[str, HookLike]
    """The hooks by name, in the order of registration."""
    settings: Settings
    """The options of the engine."""
    run_dir: Path
    """The directory of the run's files."""
    seed: int
    """The seed of the run, the same on all ranks."""
    device: torch.device
    """The device of this rank."""
    ranks: Distributed
    """The ranks that train together: `rank`, `world_size`, `is_main`, and communication between ranks."""
    precision: Precision
    """The precision (fp32, tf32, bf16 or fp16): autocast and the scaling of the loss."""

    @property
    def model(self) -> nn.Module:
        """The raw model, whose `state_dict` is in checkpoints."""
        model: nn.Module = self.task.model
        return model

    @property
    def optimizer(self) -> optim.Optimizer:
        """The optimizer; with several, all of them as one (`OptimizerSet`).

        Raises:
            UserError: the engine was built without one.
        """
        if self.trained_by is None:
            remedy = "To train with the weights of a run, use hydraloop.build with load_from=outputs/<date>/<run>."
            raise UserError("there is no optimizer: this engine only evaluates", key="optimizer", remedy=remedy)
        return self.trained_by

    @property
    def groups(self) -> list[Group]:
        """The names of the parameters in each group, in the order of `optimizer.param_groups`."""
        return describe(self.optimizer, self.model)

    @property
    def optimizers(self) -> dict[str, optim.Optimizer]:
        """The optimizers by name; the name of a single one is empty."""
        return parts(self.optimizer)


class Parts(TypedDict, total=False):
    """The arguments of `make_run`, which are also those of `Engine`."""

    task: nn.Module
    optimizer: optim.Optimizer | None
    schedules: Mapping[str, Schedule] | None
    settings: Settings | None
    run_dir: Path
    seed: int
    distributed: Distributed | None
    precision: Precision | None


def make_run(
    *,
    task: nn.Module,
    optimizer: optim.Optimizer | None = None,
    schedules: Mapping[str, Schedule] | None = None,
    hooks: Mapping[str, HookLike],
    settings: Settings | None = None,
    run_dir: Path = Path("."),
    seed: int = 0,
    distributed: Distributed | None = None,
    precision: Precision | None = None,
) -> Run:
    """Return a run of these parts, with the task on its device.

    Args:
        task: an `nn.Module` whose forward takes a batch and returns a dict with a scalar `loss`. Each of its modules
            keeps its mode (train or eval) in training.
        optimizer: over the task's parameters; None if nothing is trained.
        schedules: by name; stepped by the `param_scheduler` hook, saved by the engine.
        hooks: by name, in the order of registration.
        settings: the options; None: the defaults.
        run_dir: for this run's files; `Engine.train` creates it.
        seed: of the run; the caller seeds the generators.
        distributed: the ranks; None: a single process.
        precision: None: fp32.

    Raises:
        UserError: the task is not a task, or this machine does not have the device.
    """
    settings, ranks = settings or Settings(), distributed or Distributed()
    device = ranks.device(settings.device)
    check_task(task)
    task = task if ranks.sharded else task.to(device)  # a sharded model is on its device, or waits in host memory
    return Run(
        task, optimizer, schedules or {}, hooks, settings, run_dir, seed, device, ranks, precision or Precision()
    )
