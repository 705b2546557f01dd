"""Task: what the engine trains and evaluates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from hydraloop.engine.device.batch_transfer import leaves_of
from hydraloop.errors import UserError
from hydraloop.tasks.list_states import agree_on_list_states
from hydraloop.tasks.metrics import Metric, SumMetric, sums_dtype

LOSS = "loss"


class Task(nn.Module):
    """A model with its loss and its metrics.

    This class fits batches `(inputs, targets)` and models `inputs -> outputs`. For anything else, override `forward`
    and `evaluate` (and `num_samples`, where the first tensor of a batch does not have the samples in front).

    Args:
        model: its parameters are trained; checkpoints hold its state dict, not the task's.
        loss: of (outputs, targets), a scalar mean over the batch.
        metrics: by the name under which they are reported; entries that are None are left out.

    Raises:
        UserError: a metric has the name `loss`.
    """

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
        # A plain dict, so that metrics are no submodules: they belong neither to checkpoints nor to DDP.
        self.metrics = {name: metric for name, metric in (metrics or {}).items() if metric is not None}
        self._loss_sums = torch.zeros(2, dtype=torch.float64)
        self.device: torch.device | None = None
        """Where batches are; None: where the parameters are (which may wait in host memory with FSDP2's offload)."""

    # Properties, since nn.Module.__getattr__ would take 0.4 µs to find each of them, in every iteration. Modules are
    # kept where nn.Module keeps them, so that everything that replaces a submodule still does.

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
        """Of (outputs, targets), a scalar mean over the batch."""
        return self._modules.get("loss") or self._loss_function

    @loss.setter
    def loss(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:  # a plain function; nn.Module takes the modules
        self._loss_function = loss

    # Training. -------------------------------------------------------------------------------------------------------

    def forward(self, batch: Any) -> dict[str, Tensor]:
        """The loss of a batch, for training: `{"loss": scalar}`, the mean over its samples. No host sync.

        Or `{"loss": (sum, count)}`, a sum of losses and how many they are (a number or a scalar tensor), where samples
        do not count alike (texts of different lengths): the mean is then over all that a window and all ranks have.
        Other scalars whose name contains "loss" are logged as well.
        """
        inputs, targets = batch
        return {LOSS: self.loss(self.model(inputs), targets)}

    def num_samples(self, batch: Any) -> int:
        """Return the number of samples in a batch: the length of its first tensor that has dimensions.

        For a `PackedSequence`, the number of its sequences. No host sync. Called once an iteration, for the weights of
        an accumulation window.

        Raises:
            UserError: there is no such tensor.
        """
        for leaf in leaves_of(batch):
            if isinstance(leaf, Tensor) and leaf.ndim:
                return leaf.size(0)
            if isinstance(leaf, PackedSequence):
                return int(leaf.batch_sizes[0])  # always on the CPU
        raise UserError(
            f"a batch ({type(batch).__name__}) has no tensor that tells how many samples there are in it",
            key="task",
            remedy=f"Override num_samples(batch) in {type(self).__name__} and return their number.",
        )

    def flops(self, batch: Any) -> int | None:
        """Floating-point operations of the model for one iteration on a batch, backward included: what `mfu` in the
        record is computed from. None: not counted. No host sync."""
        return None

    # Evaluation; the engine has set eval() and no_grad(). ------------------------------------------------------------

    @property
    def metric_names(self) -> tuple[str, ...]:
        """What `compute_metrics` returns, in its order: the metrics, then "loss". Known before the first batch."""
        return (*self.metrics, LOSS)

    def higher_is_better(self, name: str) -> bool | None:
        """Whether high values of the metric are good; None where the metric does not say.

        Raises:
            KeyError: there is no metric of that name.
        """
        return False if name == LOSS else self.metrics[name].higher_is_better

    def evaluate(self, batch: Any) -> dict[str, Any]:
        """Take a batch into the metrics: `{"loss": scalar, "outputs": [N, ...]}`. No host sync."""
        inputs, targets = batch
        outputs = self.model(inputs)
        loss = self.loss(outputs, targets)
        self.update_metrics(loss, outputs, targets, self.num_samples(batch))
        return {LOSS: loss, "outputs": outputs}

    def update_metrics(self, loss: Tensor, outputs: Tensor, targets: Tensor, samples: int) -> None:
        """Add a batch of `samples` with its mean loss to the metrics; for `evaluate`, no host sync.

        A batch without samples counts for nothing: the mean of its loss is NaN.
        """
        if not samples:
            return
        self._loss_sums[0] += loss.detach() * samples
        self._loss_sums[1] += samples
        for metric in self.metrics.values():
            metric.update(outputs, targets)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Let `evaluate` leave the metrics as they are."""
        metrics, sums = self.metrics, self._loss_sums
        self.metrics, self._loss_sums = {}, sums.clone()
        try:
            yield
        finally:
            self.metrics, self._loss_sums = metrics, sums

    def reset_metrics(self) -> None:
        """Forget all batches, and move the metrics to where the model is. Called before each evaluation."""
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
        """The metrics over all batches since `reset_metrics`, in the order of `metric_names`. One host sync.

        Args:
            reduce: adds a vector up over all ranks (the mean does as well: the built-in metrics are quotients of
                sums). Called once, on every rank. Metrics that are no `SumMetric` reduce themselves, as those of
                torchmetrics do.
            gather: a plain value (tensors on the CPU, lists) of all ranks, by rank; for metrics of torchmetrics that
                keep all samples, which would fail where a rank has none. Without such metrics it is not called.
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
    """The value of a metric, which has to be one number to be monitored and logged."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().reshape(())
    if isinstance(value, (int, float)):
        return torch.tensor(float(value))
    got = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise UserError(
        f"its value is {got}, not one number",
        key=f"task.metrics.{name}",
        remedy="Let it average, over the classes for example (average=macro in torchmetrics).",
    )
