"""The steps of a task: several losses in one iteration, each for one of several optimizers (a GAN)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn, optim

from hydraloop.engine.batches import Batches, Window
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.loss_check import LossCheck
from hydraloop.engine.run_parts import Run
from hydraloop.engine.stepper import Outputs, Stepper
from hydraloop.errors import UserError
from hydraloop.schemas.option_checks import check_at_least


class TaskStep(NamedTuple):
    """A step of a task."""

    name: str
    optimizer: optim.Optimizer
    every: int
    """It runs in every n-th iteration."""
    own: dict[str, nn.Parameter]
    """The parameters of its optimizer, by their names in the task."""
    others: list[nn.Parameter]
    """The parameters of the task that belong to other optimizers."""

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """Its parameters that are not frozen."""
        return {name: parameter for name, parameter in self.own.items() if parameter.requires_grad}


class TaskStepper(Stepper):
    """Trains a task with steps: for each, forward, backward and the step of its optimizer.

    Raises:
        UserError: the steps are not those of the optimizers, or the run has an option that steps do not allow.
    """

    wraps = False

    def __init__(self, run: Run, batches: Batches, loss_check: LossCheck) -> None:
        _check(run)
        super().__init__(run, batches, loss_check)
        self._progress = run.progress
        named = dict(run.task.named_parameters())
        self._steps = []
        for name in run.task.steps:
            optimizer = run.optimizers[name]
            held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
            own = {key: parameter for key, parameter in named.items() if parameter in held}
            others = [parameter for parameter in named.values() if parameter not in held]
            self._steps.append(TaskStep(name, optimizer, run.settings.every.get(name, 1), own, others))

    def train_batch(self, window: Window, batch_idx: int, batch: Any) -> Outputs:
        """Do the steps that run in this iteration; not those whose parameters are all frozen.

        Returns:
            `<step>/<name>` of what each step returned, and as `loss` the sum of the losses.
        """
        outputs: Outputs = {}
        total: Any = 0.0
        stepped = False
        iteration = self._progress.iteration + 1
        self.local_samples = self._task.num_samples(batch)
        for step in self._steps:
            if iteration % step.every or not step.trained:
                continue
            self.task_step = step.name
            self.optimizer = step.optimizer
            self._current = step
            of_step = super().train_batch(window, batch_idx, batch)
            stepped |= self.stepped
            outputs.update((f"{step.name}/{name}", value) for name, value in of_step.items())
            total = total + of_step["loss"]
        self.task_step = ""
        self.optimizer = self._all_optimizers
        self.stepped = stepped
        outputs["loss"] = total
        self.loss_weights["loss"] = self.local_samples
        return outputs

    def _forward_backward(self, batch_idx: int, batch: Any, *, ends_window: bool) -> Outputs:
        step = self._current
        # The forward pass must not see that the others require gradients, or its backward would compute them.
        with without_gradients(step.others):
            outputs = super()._forward_backward(batch_idx, batch, ends_window=ends_window)
        self._ranks.average(step.trained, step.name)
        return outputs


@contextmanager
def without_gradients(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let parameters not require gradients in the body; frozen ones stay frozen. 0.15 µs for each."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def make_stepper(run: Run, batches: Batches, loss_check: LossCheck) -> Stepper:
    """Return what trains the task of a run, with its steps if it has some.

    Raises:
        UserError: as in `TaskStepper`; or without steps, an optimizer has `every`.
    """
    if run.optimizer_or_none is None:
        return Stepper(run, batches, loss_check)
    if getattr(run.task, "steps", ()):
        return TaskStepper(run, batches, loss_check)
    for name in run.optimizers:
        if run.settings.every.get(name, 1) != 1:
            raise UserError(
                "only an optimizer that a step of the task uses can pause, and the task has no steps",
                key=".".join(filter(None, ("optimizer", name, "every"))),
                remedy="Use 1, or name the steps in the task: steps = (…), as docs/how-to/optimizers.md shows.",
            )
    return Stepper(run, batches, loss_check)


def _check(run: Run) -> None:
    task, steps, optimizers = type(run.task).__name__, run.task.steps, run.optimizers
    if odd := sorted(optimizers.keys() ^ {*steps}):
        given = ", ".join(filter(None, optimizers)) or "not named"
        raise UserError(
            f"{task} has the steps {', '.join(steps)}, and the optimizers are {given}",
            key=f"optimizer.{odd[-1]}",
            remedy="Give each step one optimizer with the name of the step, as docs/how-to/optimizers.md shows.",
        )
    for name in steps:
        check_at_least(1, **{f"optimizer.{name}.every": run.settings.every.get(name)})
    if run.settings.accumulate > 1:
        raise UserError(
            f"{task} has several steps, which cannot share accumulated batches",
            key="engine.accumulate",
            remedy="Use engine.accumulate=1 and a larger data.loader.batch_size.",
        )
    check_sharding(run.task, run.ranks)


def check_sharding(task: Any, distributed: Distributed) -> None:
    """Refuse to shard the model of a task with steps: FSDP2 gathers weights in a forward of the whole model, and steps
    call its parts."""
    if distributed.sharded and task.steps:
        raise UserError(
            f"{type(task).__name__} has several steps, which FSDP2 does not support",
            key="distributed.strategy",
            remedy="Use distributed.strategy=ddp.",
        )
