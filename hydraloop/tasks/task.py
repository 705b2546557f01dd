"""Task: a model with its loss and its metrics, as the engine trains and evaluates it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from hydraloop.engine.loss_weighting import SumAndCount, check_form, loss_of, mean_of
from hydraloop.engine.messages import TAKEN, check_names, plain, scalars_of
from hydraloop.errors import UserError
from hydraloop.tasks.metrics import Metric
from hydraloop.tasks.values import Averages, samples_in, shown, values_over_ranks

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine


def ignored_label(task: Any) -> int:
    """Return the `ignore_index` of a `Task` or of its loss; otherwise -100, the default of torch."""
    return getattr(task, "ignore_index", getattr(task.loss, "ignore_index", -100))


def labels_error(task: Any, labels: Tensor, classes: int, where: str = "a batch") -> UserError:
    """Return the error of integer labels, some of which are neither in 0 … classes - 1 nor ignored.

    Args:
        task: a `Task`.
        where: has the labels, for the error.
    """
    found = sorted(set(labels.flatten().tolist()) - {ignored_label(task)})
    wrong = [label for label in found if not 0 <= label < classes]
    shown = ", ".join(map(str, found)) if len(found) <= 12 else f"{found[0]} to {found[-1]}"
    problem = f"the model has {classes} classes, 0 to {classes - 1}, but the labels in {where} are {shown}"
    if wrong[0] < 0 or wrong == [255]:
        option = "task.ignore_index" if hasattr(task, "ignore_index") else "+task.loss.ignore_index"
        remedy = f"If {wrong[0]} means that there is no label: {option}={wrong[0]}. Classes begin at 0."
        return UserError(problem, key="task.model", remedy=remedy)
    needed = found[-1] + 1
    remedy = f"Let the model have {needed} classes, usually task.model.num_classes={needed}."
    if found[0] > 0:
        remedy += " Classes begin at 0: if yours do not, let the data set subtract the first one."
    return UserError(problem, key="task.model", remedy=remedy)


LOSS = "loss"
OUTPUTS = "outputs"
TARGETS = "targets"


class Task(nn.Module):
    """A model with its loss and its metrics.

    This class is for batches `(inputs, targets)` and models `inputs -> outputs`. For others, override `forward`, and
    `num_samples` if dimension 0 of a batch's first tensor does not count the samples.

    Args:
        model: its parameters are trained. Checkpoints have its state dict, and in a separate entry the other state of
            the task: buffers such as a queue, frozen modules such as a teacher.
        loss: function of (outputs, targets) that returns the scalar mean over the batch; None if `forward` computes it.
        metrics: by the names in the results. Entries that are None are ignored.

    Raises:
        UserError: a metric is named `loss`.
    """

    steps: ClassVar[tuple[str, ...]] = ()
    """The names of the steps of an iteration, in order, for a task with several losses (a GAN). Each is the name of an
    optimizer. `forward(batch, step=name)` is called for each in training, and `forward(batch)` in evaluation."""
    model: nn.Module
    """The model."""
    loss: Callable[[Tensor, Tensor], Tensor]
    """Function of (outputs, targets) that returns the scalar mean over the batch."""
    engine: Engine
    """The engine that runs this task, set by the engine: `forward` may call `self.engine.log_image(...)`."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
        metrics: Mapping[str, Metric | None] | None = None,
    ) -> None:
        super().__init__()
        if LOSS in (metrics or {}):
            raise UserError(
                "the name 'loss' is that of the loss in the results",
                key="metrics.loss",
                remedy="Give the metric another name.",
            )
        self.model = model
        self.loss = _no_loss if loss is None else loss
        # A plain dict, so that metrics are not submodules, which would be in checkpoints and in DDP.
        self.metrics = {name: metric for name, metric in (metrics or {}).items() if metric is not None}
        self.logged: dict[str, float | Tensor] = {}
        """Values of the current batch given to `log`, by name. Consumed after the batch."""
        self._averages = Averages(LOSS)
        self._is_uncounted = False
        self._found: tuple[str, ...] = ()
        self.pictures: dict[str, Tensor] = {}
        """Values of the last `compute_metrics` that are matrices `[R, C]` (a confusion matrix), by name."""
        self.device: torch.device | None = None
        """Device of the batches; None: that of the parameters. They differ with FSDP2's offload to host memory."""

    # Training. -------------------------------------------------------------------------------------------------------

    def forward(self, batch: Any) -> dict[str, Any]:
        """Return `{"loss": scalar}`, the mean over the samples, and in eval mode also `outputs` and `targets`.

        Training and evaluation call this method. `outputs` and `targets` are for the metrics. Other scalars are
        averaged and logged, in training and in evaluation. Returning `outputs` in training keeps them in memory for
        the rest of the iteration. No host sync.

        If batches have different numbers of terms (texts of different lengths), return `{"loss": (sum, count)}`, with
        the count as a number or a scalar tensor. The loss is then the mean over all terms of the accumulation window
        and of all ranks.
        """
        inputs, targets = batch
        outputs = self.call_model(inputs, targets)
        loss = self.compute_loss(outputs, targets)
        return {LOSS: loss} if self.training else {LOSS: loss, OUTPUTS: outputs, TARGETS: targets}

    def call_model(self, inputs: Any, targets: Any) -> Any:
        """Return the model's outputs for a batch. Subclasses check their shape."""
        return self.model(inputs)

    def compute_loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the loss of `outputs`.

        Raises:
            UserError: a label is not below the number of classes of a `CrossEntropyLoss` or `NLLLoss`. A GPU reports
                this later, as a failed assertion.
        """
        loss = self.loss
        try:
            return loss(outputs, targets)
        except IndexError as error:
            if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) and "Target" in str(error):
                classes = outputs.size(1 if outputs.ndim > 1 else 0)
                raise labels_error(self, targets, classes) from error
            raise

    def log(self, name: str, value: float | Tensor) -> None:
        """Log a value of the current batch, in training, validation or test. No host sync.

        Records and trackers get the mean over all samples and ranks: since the last record in training, of all batches
        in an evaluation. Call it in `forward`, in methods that `forward` calls, or in a custom `evaluate` before
        `update_metrics`. A second value for the same name and batch replaces the first; a value that `forward` returns
        with this name is ignored.

        Args:
            name: in the records. In a step of the task, they have `<step>/<name>`.
            value: a mean over the samples of the batch: a number, or a scalar tensor on any device.

        Raises:
            UserError: the value is not a number, or records already use the name.
        """
        check_names([name], TAKEN)
        if self.steps and hasattr(self, "engine") and self.engine.stepper.task_step:
            name = f"{self.engine.stepper.task_step}/{name}"
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.detach().clone().reshape(())  # a copy: parameters and buffers change before it is read
        elif not isinstance(value := plain(value), int | float):
            raise UserError(
                f"log({name!r}, …) got {shown(value)}, not one number",
                key="task",
                remedy="Log its mean over the samples of the batch.",
            )
        self.logged[name] = value

    @property
    def counts_its_own_samples(self) -> bool:
        """Whether the class overrides `num_samples`; the number of samples is then not that of the sampler."""
        return type(self).num_samples is not Task.num_samples

    def num_samples(self, batch: Any) -> int:
        """Return the number of samples in a batch: the length of its first tensor that has dimensions.

        For a `PackedSequence`, the number of its sequences. Called once an iteration, to weight the batches of an
        accumulation window. No host sync.

        Raises:
            UserError: there is no such tensor.
        """
        return samples_in(batch, type(self).__name__)

    # Evaluation, in eval mode and without gradients. ------------------------------------------------------------------

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The names that `compute_metrics` returns, in its order: the metrics, "loss", then other scalars.

        Before the first `compute_metrics`, which shows what the metrics and `forward` return: the metrics, then "loss".
        """
        return self._found or (*self.metrics, LOSS)

    def higher_is_better(self, name: str) -> bool | None:
        """Return whether high values of a metric are good; None if the metric does not say.

        Raises:
            KeyError: there is no such metric.
        """
        if name == LOSS:
            return False
        for key, metric in self.metrics.items():
            if name == key or name.startswith(f"{key}/"):
                return getattr(metric, "higher_is_better", None)
        if name in self._averages.names:
            return None
        raise KeyError(name)

    def evaluate(self, batch: Any) -> dict[str, Any]:
        """Call `forward`, update the metrics, and return its result, with `loss` as a mean. No host sync.

        If the class has `predictions_of`, its result is `predictions`. Other scalars in the result are averaged over
        the samples, unless a metric has the same name. A batch without samples, whose mean loss is NaN, is ignored.
        A result with `outputs` for metrics needs no loss, as detectors return it in training only.

        Raises:
            UserError: there are metrics, and the result has no `outputs` and `targets`; or it needs a loss.
        """
        samples = self.num_samples(batch)
        training, self.training = self.training, False  # also if a caller has not called eval()
        try:
            result = self.forward(batch)
        finally:
            self.training = training
        has_none = self.metrics and isinstance(result, Mapping) and LOSS not in result and OUTPUTS in result
        loss = None if has_none else loss_of(self, result)
        self.logged.update({**dict(scalars_of(result)), **self.logged})
        self._count(loss, samples, result)
        found = dict(result)
        if loss is not None:
            found[LOSS] = loss if isinstance(loss, Tensor) else mean_of(loss)
        if isinstance(found.get(OUTPUTS), Tensor) and (predictions := self.predictions_of(found[OUTPUTS])) is not None:
            found["predictions"] = predictions
        return found

    def predictions_of(self, outputs: Tensor) -> Tensor | None:
        """Return the predictions for `outputs`, an entry for each sample, for pictures. None: the outputs are shown."""
        return None

    def predict(self, batch: Any) -> Any:
        """Return the predictions for a batch: a tensor or a list with an entry for each sample, or a dict of these.

        By default the model's outputs for the inputs: the first entry of a tuple or list, or the batch itself, so that
        data without targets works. No host sync.
        """
        return self.model(batch[0] if isinstance(batch, tuple | list) else batch)

    def update_metrics(self, loss: Tensor, outputs: Tensor, targets: Tensor, samples: int) -> None:
        """Add a batch of `samples` with its mean loss to the metrics, for a custom `evaluate`. No host sync.

        A batch without samples, whose mean loss is NaN, is ignored.

        Raises:
            UserError: the loss is not a scalar tensor.
        """
        check_form(self, loss)
        self._count(loss, samples, {OUTPUTS: outputs, TARGETS: targets})

    def _count(self, loss: Tensor | SumAndCount | None, samples: int, result: Mapping[str, Any]) -> None:
        """Add a batch to the loss, to the scalars and to the metrics."""
        logged = {name: value for name, value in self.logged.items() if name not in self.metrics}
        self.logged.clear()
        if not samples or self._is_uncounted:
            return
        if loss is None:
            self._averages.needs_first = False
        elif isinstance(loss, Tensor):
            self._averages.add_mean(LOSS, loss, samples)
        else:
            self._averages.add(LOSS, *loss)
        for name, value in logged.items():
            self._averages.add_mean(name, value, samples)
        missing = [name for name in (OUTPUTS, TARGETS) if name not in result]
        if missing and self.metrics:
            raise UserError(
                f"{type(self).__name__}.forward returned no {' and no '.join(missing)} in eval mode, which the metrics "
                f"({', '.join(self.metrics)}) need",
                key="task",
                remedy='Return {"loss": …, "outputs": …, "targets": …}, or remove the metrics.',
            )
        for metric in self.metrics.values():
            metric.update(result[OUTPUTS], result[TARGETS])

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Keep `evaluate` from changing the metrics."""
        self._is_uncounted = True
        try:
            yield
        finally:
            self._is_uncounted = False
            self.logged.clear()

    def reset_metrics(self) -> None:
        """Reset the metrics and move them to the device of the batches. Called before each evaluation."""
        device = self.device or next((parameter.device for parameter in self.parameters()), torch.device("cpu"))
        self._averages.reset(device)
        self.logged.clear()
        for metric in self.metrics.values():
            metric.to(device)
            metric.reset()

    def compute_metrics(
        self,
        reduce: Callable[[Tensor], Tensor] | None = None,
        gather: Callable[[Any], list[Any]] | None = None,
    ) -> dict[str, float]:
        """Return the metrics over all batches since `reset_metrics`, in the order of `metric_names`. Two host syncs.

        A metric whose value is a mapping gives `name/key`, a vector `name/0`, `name/1`, …. Matrices are in `pictures`.

        Args:
            reduce: sums a vector over all ranks. (The mean works too: the built-in metrics are quotients of sums.)
                Called once, on every rank; again if a rank has scalars with new names. Metrics that are not a
                `SumMetric` reduce themselves, as torchmetrics' do.
            gather: returns a plain value (tensors on the CPU, lists) of all ranks, by rank. Called only for new names.
        """
        if self.logged:
            raise UserError(
                f"{type(self).__name__}.evaluate logs {', '.join(self.logged)} and calls no update_metrics after it",
                key="task",
                remedy="Call self.log before self.update_metrics.",
            )
        found, self.pictures = values_over_ranks(self.metrics, self._averages, reduce, gather)
        self._found = tuple(found)
        return found


def _no_loss(outputs: Any, targets: Any) -> Tensor:
    """Stand for a loss of None."""
    raise UserError(
        "the task computes its loss from task.loss, which is null",
        key="task.loss",
        remedy="Set a loss, for example task.loss._target_=torch.nn.CrossEntropyLoss, or override the task's forward.",
    )
