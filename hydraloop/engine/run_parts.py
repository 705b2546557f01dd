"""Run: what a run is made of, and its options (`Settings`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn, optim

from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.hook import Hook
from hydraloop.engine.hook_order import CallTable
from hydraloop.engine.messages import Messages
from hydraloop.engine.named_optimizers import Group, describe, parts
from hydraloop.engine.precision import Precision
from hydraloop.engine.progress import Progress
from hydraloop.errors import UserError
from hydraloop.files.result import PAUSE
from hydraloop.schemas.engine import EngineConf

if TYPE_CHECKING:
    from hydraloop.optim.schedule import Schedule
    from hydraloop.optim.torch_schedule import TorchSchedule


@dataclass
class Settings(EngineConf):
    """The options of the engine, with those of other groups that it needs."""

    channels_last: bool = False
    """Whether images are stored channels last on the device."""
    resume: Path | None = None
    """The checkpoint file to resume from."""
    resume_strict: bool = True
    optimizer_overrides: frozenset[str] = frozenset()
    """Hyperparameters (`lr`, with several optimizers `generator.lr`) whose values in the config replace those of the
    resumed checkpoint; `groups` and `layer_decay` stand for all of them."""
    every: Mapping[str, int] = field(default_factory=dict)
    """For each step of the task, by name: it runs in every n-th iteration. 1 if it is not here."""
    closures: Mapping[str, bool | None] = field(default_factory=dict)
    """For each optimizer, by name: whether `step` gets a closure. None, or not here: if `step` requires one."""
    load_from: Path | None = None
    """A checkpoint file or state dict to take weights from."""
    weights: str = "averaged"
    """`averaged` or `raw`: which weights `load_from`, validation and test use if there are both."""
    objectives: Mapping[str, bool] = field(default_factory=dict)
    """The metrics that the search of this job optimizes, and whether high values of each are good."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Plain values for every checkpoint's `meta` (the config, the experiment's name)."""

    @property
    def out_of_time(self) -> str:
        """The reason of a stop by `max_time`."""
        return f"engine.max_time={self.max_time}"

    @property
    def pause(self) -> str:
        """The reason of a preemption by `pause_after`."""
        return f"{PAUSE}={self.pause_after}"

    def limited(self, split: str, length: int) -> int:
        """Return how many of a loader's `length` batches a split uses (`limit_<split>_batches`)."""
        limit = getattr(self, f"limit_{split}_batches")
        if limit is None:
            return length
        return min(length, max(1, round(limit * length)) if isinstance(limit, float) else limit)


@dataclass(frozen=True)
class Run:
    """The parts of a run, finished objects. Which objects they are does not change."""

    task: Any
    """The task: an `nn.Module` whose forward takes a batch and returns a dict with a scalar `loss`."""
    optimizer_or_none: optim.Optimizer | None
    """The optimizer; with several, all of them as one (`OptimizerSet`); None if the engine only evaluates."""
    schedules: Mapping[str, Schedule | TorchSchedule]
    """The schedules by name."""
    hooks: Mapping[str, Hook]
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
    progress: Progress
    """How far the run is."""
    messages: Messages
    """What hooks tell each other."""
    calls: CallTable
    """The hooks by mount point, in order."""

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
        if self.optimizer_or_none is None:
            remedy = "To train with the weights of a run, use hydraloop.build with load_from=outputs/<date>/<run>."
            raise UserError("there is no optimizer: this engine only evaluates", key="optimizer", remedy=remedy)
        return self.optimizer_or_none

    @property
    def groups(self) -> list[Group]:
        """The names of the parameters in each group, in the order of `optimizer.param_groups`."""
        return describe(self.optimizer, self.model)

    @property
    def optimizers(self) -> dict[str, optim.Optimizer]:
        """The optimizers by name; the name of a single one is empty."""
        return parts(self.optimizer)


_OF_A_TASK = (
    "model", "metric_names", "num_samples", "evaluate", "predict", "higher_is_better", "logged", "uncounted",
    "reset_metrics", "compute_metrics", "pictures",
)  # fmt: skip
"""What the engine uses of a task."""


def check_task(task: Any) -> None:
    """Refuse a module that is not a task."""
    lacking = [name for name in _OF_A_TASK if not hasattr(task, name)]
    if lacking:
        raise UserError(
            f"{type(task).__name__} is not a task: it has no {lacking[0]}",
            key="task",
            remedy="Use it as the model of a task, such as hydraloop.tasks.Classification(model, loss, metrics), or "
            "inherit from hydraloop.Task.",
        )
    steps = getattr(task, "steps", ())
    if not isinstance(steps, tuple):
        raise UserError(
            f"{type(task).__name__}.steps is {steps!r}, not a tuple with the names of steps",
            key="task",
            remedy='Write: steps = ("discriminator", "generator"), or give another name to this attribute.',
        )
