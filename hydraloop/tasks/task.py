"""Task: what the engine trains and evaluates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from hydraloop.engine.device.batch_transfer import leaves_of
from hydraloop.errors import UserError
from hydraloop.tasks.list_states import agree_on_list_states
from hydraloop.tasks.metrics import Metric, SumMetric, sums_dtype

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine

LOSS = "loss"


class Task(nn.Module):
    """A model with its loss and its metrics.

    This class is for batches `(inputs, targets)` and models `inputs -> outputs`. For others, override `forward` and
    `evaluate`, and `num_samples` if dimension 0 of a batch's first tensor does not count the samples.

    Args:
        model: its parameters are trained. Checkpoints have its state dict, not the task's.
        loss: function of (outputs, targets) that returns the scalar mean over the batch.
        metrics: by the names in the results. Entries that are None are ignored.

    Raises:
        UserError: a metric is named `loss`.
    """

    engine: Engine
    """The engine that runs this task, set by the engine: `forward` may call `self.engine.log_image(...)`."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
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
        self.loss = loss
        # A plain dict, so that metrics are not submodules, which would be in checkpoints and in DDP.
        self.metrics = {name: metric for name, metric in (metrics or {}).items() if metric is not None}
        self._loss_sums = torch.zeros(2, dtype=torch.float64)
        self.device: torch.device | None = None
        """Device of the batches; None: that of the parameters. They differ with FSDP2's offload to host memory."""

    # These are properties because nn.Module.__getattr__ takes 0.4 µs, in every iteration. The modules themselves are
    # in nn.Module's own dict, so that code that replaces a submodule still works.

    @property
    def model(self) -> nn.Module:
        """The model."""
        model = self._modules.get("model")
        if model is None:
            raise AttributeError("this task has no model")
        return model

    @model.setter
    def model(self, model: nn.Module) -> None:
        self._modules["model"] = model

    @property
    def loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Function of (outputs, targets) that returns the scalar mean over the batch."""
        return self._modules.get("loss") or self._loss_function

    @loss.setter
    def loss(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:  # a plain function; nn.Module takes the modules
        self._loss_function = loss

    # Training. -------------------------------------------------------------------------------------------------------

    def forward(self, batch: Any) -> dict[str, Tensor]:
        """Return the loss of a batch, for training: `{"loss": scalar}`, the mean over its samples. No host sync.

        If batches have different numbers of terms (texts of different lengths), return `{"loss": (sum, count)}`, with
        the count as a number or a scalar tensor. The loss is then the mean over all terms of the accumulation window
        and of all ranks. Other scalars whose name contains "loss" are logged too.
        """
        inputs, targets = batch
        return {LOSS: self.loss(self.call_model(inputs, targets), targets)}

    def call_model(self, inputs: Any, targets: Any) -> Any:
        """Return the model's outputs for a batch. Subclasses check their shape."""
        return self.model(inputs)

    def num_samples(self, batch: Any) -> int:
        """Return the number of samples in a batch: the length of its first tensor that has dimensions.

        For a `PackedSequence`, the number of its sequences. Called once an iteration, to weight the batches of an
        accumulation window. No host sync.

        Raises:
            UserError: there is no such tensor.
        """
        for leaf in leaves_of(batch):
            if isinstance(leaf, Tensor) and leaf.ndim:
                return leaf.size(0)
            if isinstance(leaf, PackedSequence):
                return int(leaf.batch_sizes[0])  # always on the CPU
        raise UserError(
            f"a batch ({type(batch).__name__}) has no tensor that shows its number of samples",
            key="task",
            remedy=f"Override num_samples(batch) in {type(self).__name__} and return their number.",
        )

    def flops(self, batch: Any) -> int | None:
        """Return the floating-point operations of an iteration on a batch, including backward; None: not known.

        `mfu` in the records is computed from it. No host sync.
        """
        return None

    # Evaluation, in eval mode and without gradients. ------------------------------------------------------------------

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The names that `compute_metrics` returns, in its order: the metrics, then "loss"."""
        return (*self.metrics, LOSS)

    def higher_is_better(self, name: str) -> bool | None:
        """Return whether high values of a metric are good; None if the metric does not say.

        Raises:
            KeyError: there is no such metric.
        """
        return False if name == LOSS else self.metrics[name].higher_is_better

    def evaluate(self, batch: Any) -> dict[str, Any]:
        """Add a batch to the metrics and return `{"loss": scalar, "outputs": [N, ...]}`. No host sync."""
        inputs, targets = batch
        outputs = self.call_model(inputs, targets)
        loss = self.loss(outputs, targets)
        self.update_metrics(loss, outputs, targets, self.num_samples(batch))
        return {LOSS: loss, "outputs": outputs}

    def update_metrics(self, loss: Tensor, outputs: Tensor, targets: Tensor, samples: int) -> None:
        """Add a batch of `samples` with its mean loss to the metrics, for `evaluate`. No host sync.

        A batch without samples, whose mean loss is NaN, is ignored.
        """
        if not samples:
            return
        self._loss_sums[0] += loss.detach() * samples
        self._loss_sums[1] += samples
        for metric in self.metrics.values():
            metric.update(outputs, targets)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Keep `evaluate` from changing the metrics."""
        metrics, sums = self.metrics, self._loss_sums
        self.metrics, self._loss_sums = {}, sums.clone()
        try:
            yield
        finally:
            self.metrics, self._loss_sums = metrics, sums

    def reset_metrics(self) -> None:
        """Reset the metrics and move them to the device of the batches. Called before each evaluation."""
        device = self.device or next((parameter.device for parameter in self.parameters()), torch.device("cpu"))
        self._loss_sums = torch.zeros(2, dtype=sums_dtype(device), device=device)
        for metric in self.metrics.values():
            metric.to(device)
            metric.reset()

    def compute_metrics(
        self,
        reduce: Callable[[Tensor], Tensor] | None = None,
        gather: Callable[[Any], list[Any]] | None = None,
    ) -> dict[str, float]:
        """Return the metrics over all batches since `reset_metrics`, in the order of `metric_names`. One host sync.

        Args:
            reduce: sums a vector over all ranks. (The mean works too: the built-in metrics are quotients of sums.)
                Called once, on every rank. Metrics that are not a `SumMetric` reduce themselves, as torchmetrics' do.
            gather: returns a plain value (tensors on the CPU, lists) of all ranks, by rank. Called only for metrics of
                torchmetrics that keep all samples, which fail if a rank has no samples.
        """
        own = {name: metric for name, metric in self.metrics.items() if isinstance(metric, SumMetric)}
        sums = torch.cat([self._loss_sums, *(metric.sums for metric in own.values())])
        if reduce is not None:
            sums = reduce(sums)
        loss, *parts = torch.split(sums, [2, *(len(metric.sums) for metric in own.values())])
        values = {name: metric.value(part) for (name, metric), part in zip(own.items(), parts, strict=True)}
        values[LOSS] = loss[0] / loss[1]
        if gather is not None:
            agree_on_list_states([metric for name, metric in self.metrics.items() if name not in values], gather)
        for name, metric in self.metrics.items():
            if name not in values:
                values[name] = _scalar(name, metric.compute())
        names = self.metric_names
        numbers = torch.stack([values[name].to(sums) for name in names]).tolist()
        return dict(zip(names, numbers, strict=True))


def _scalar(name: str, value: Any) -> Tensor:
    """Return the value of a metric as a scalar tensor."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().reshape(())
    if isinstance(value, (int, float)):
        return torch.tensor(float(value))
    raise UserError(
        f"its value is {shown(value)}, not one number",
        key=f"task.metrics.{name}",
        remedy="Average it, for example over the classes (average=macro in torchmetrics).",
    )


def shown(value: Any) -> str:
    """Return a description of a value for an error: "a tensor of shape [2, 3]" or "a tuple"."""
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
