"""Values of an evaluation: means over all samples, the numbers and matrices of metrics, and the samples of a batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from hydraloop.engine.batch_transfer import leaves_of
from hydraloop.engine.distributed.comm import SumsByName
from hydraloop.engine.messages import as_tensor
from hydraloop.errors import UserError
from hydraloop.tasks.metrics import Metric, SumMetric, sums_dtype

_CPU = torch.device("cpu")


class Averages:
    """Means of named scalars over the samples of an evaluation and over all ranks.

    Args:
        always: the name of a scalar that has a mean even if no batch was added: NaN.
        device: that of the values that will be added.
    """

    def __init__(self, always: str, device: torch.device = _CPU) -> None:
        self._by_name = SumsByName(always)
        self.reset(device)

    @property
    def names(self) -> list[str]:
        """The names that a rank has added since the start of the run; the same on all ranks."""
        return self._by_name.names

    def reset(self, device: torch.device) -> None:
        """Remove all values; the device is that of the values that will be added."""
        zeros = torch.zeros(2, dtype=sums_dtype(device), device=device)
        self.zeros, self._sums = zeros, {self.names[0]: zeros.clone()}
        self.needs_first = True
        """Whether the scalar `always` is NaN without values; otherwise, it is left out."""

    def add(self, name: str, total: Any, count: Any) -> None:
        """Add the sum of `count` values; both are numbers or scalar tensors. No host sync.

        Raises:
            UserError: the sum is not a scalar.
        """
        sums = self._sums.get(name)
        if sums is None:
            sums = self._sums[name] = self.zeros.clone()
        if isinstance(total, Tensor) and (total.ndim or total.requires_grad):
            if total.numel() != 1:
                raise UserError(
                    f"the task's {name} is {shown(total)}, not one number",
                    key="task",
                    remedy=f"Return its mean over the samples: {name}.mean().",
                )
            total = total.detach().reshape(())
        sums[0] += total
        sums[1] += count

    def add_mean(self, name: str, mean: Any, count: int) -> None:
        """Add `count` values by their mean, a number or a scalar tensor. No host sync.

        Raises:
            UserError: the mean is not a scalar.
        """
        if isinstance(mean, Tensor):
            mean = mean.to(self.zeros.dtype)  # in half precision, the sum is infinite above 65504
        self.add(name, mean * count, count)

    def over_ranks(
        self,
        parts: list[Tensor],
        reduce: Callable[[Tensor], Tensor] | None,
        gather: Callable[[Any], list[Any]] | None,
    ) -> tuple[dict[str, float], list[Tensor]]:
        """Return the means, and the vectors `parts` summed over all ranks. One host sync.

        Args: as in `Task.compute_metrics`.
        """
        sums, summed = self._by_name.over_ranks(
            self._sums, self.zeros, reduce or (lambda row: row), gather or (lambda value: [value]), parts
        )
        means = {
            name: total / count if count else math.nan
            for name, (total, count) in sums.items()
            if count or (name == self.names[0] and self.needs_first)
        }
        return means, summed


def values_over_ranks(
    metrics: Mapping[str, Metric],
    averages: Averages,
    reduce: Callable[[Tensor], Tensor] | None,
    gather: Callable[[Any], list[Any]] | None,
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Return the numbers of an evaluation, metrics first, and the matrices of metrics. Two host syncs.

    Args: as in `Task.compute_metrics`.
    """
    of_sums = {name: metric for name, metric in metrics.items() if isinstance(metric, SumMetric)}
    scalars, sums = averages.over_ranks([metric.sums for metric in of_sums.values()], reduce, gather)
    values = {name: metric.value(part) for (name, metric), part in zip(of_sums.items(), sums, strict=True)}
    others = {name: metric for name, metric in metrics.items() if name not in of_sums}
    values |= {name: metric.compute() for name, metric in others.items()}
    tensors, matrices = numbers_and_matrices({name: values[name] for name in metrics})
    read = torch.stack([part.to(averages.zeros) for part in tensors.values()]).tolist() if tensors else []
    numbers = dict(zip(tensors, read, strict=True))
    return {**numbers, **scalars, **numbers}, matrices  # metrics are first, and have precedence


def numbers_and_matrices(values: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the scalars and the matrices in the values of metrics, by the names of `forms_of`. No host sync.

    Raises:
        UserError: a value has another form.
    """
    numbers: dict[str, Tensor] = {}
    matrices: dict[str, Tensor] = {}
    for name, value in values.items():
        for part_name, part in forms_of(name, value):
            (matrices if part.ndim else numbers)[part_name] = part
    return numbers, matrices


def forms_of(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the parts of a metric's value with their names, each a scalar tensor or a matrix `[R, C]`.

    A number, or a tensor with one entry, has the name itself. The parts of a mapping are `name/key`, those of a vector
    `name/0`, `name/1`, …. An empty vector or matrix has no parts. No host sync.

    Raises:
        UserError: the value has another form.
    """
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from forms_of(f"{name}/{key}", part)
        return
    if isinstance(value, int | float):
        value = torch.tensor(float(value))
    elif isinstance(value, np.ndarray | np.generic):
        value = as_tensor(value)
    if not isinstance(value, Tensor) or value.ndim > 2:
        raise UserError(
            f"its value is {shown(value)}, not a number, a vector, a matrix or a mapping of them",
            key=f"task.metrics.{name}",
            remedy="Let its compute return one of them. Metrics of torchmetrics have options such as average=macro.",
        )
    value = value.detach()
    if value.numel() == 1:
        yield name, value.reshape(())
    elif value.ndim == 2:
        if value.numel():
            yield name, value
    else:
        yield from ((f"{name}/{index}", part) for index, part in enumerate(value))


def output_error(model: nn.Module, output: Any, needed: str, remedy: str) -> UserError:
    """Return the error of a model whose output a task cannot use; `needed` completes "Net returned a tuple …"."""
    return UserError(f"{type(model).__name__} returned {shown(output)} {needed}", key="task.model", remedy=remedy)


def shown(value: Any) -> str:
    """Return a description of a value for an error: "a tensor of shape [2, 3]" or "a tuple"."""
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def samples_in(batch: Any, task: str) -> int:
    """Return the length of a batch's first tensor that has dimensions; for a `PackedSequence`, of its sequences.

    In a list or tuple, a list of mappings has one for each sample, as the targets of torchvision's detectors.

    Args:
        batch: of any form.
        task: the class of the task, for the error.

    Raises:
        UserError: there is no such tensor, or nothing in the batch.
    """
    first = batch[0] if type(batch) in (list, tuple) and batch else batch
    if isinstance(first, Tensor) and first.ndim:  # the usual batch, without a search
        return first.shape[0]
    for entry in batch if isinstance(batch, list | tuple) else ():
        if isinstance(entry, list | tuple) and entry and all(isinstance(one, Mapping) for one in entry):
            return len(entry)
    leaves = list(leaves_of(batch))
    if all(leaf is None for leaf in leaves):
        raise UserError(
            f"a batch is empty ({contents(batch)}), so it has no samples",
            key="data.loader.collate_fn",
            remedy="Let it return at least one sample, or leave such samples out of the data set.",
        )
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.ndim:
            return leaf.shape[0]
        if isinstance(leaf, PackedSequence):
            return int(leaf.batch_sizes[0])  # always on the CPU
    raise UserError(
        f"a batch ({contents(batch)}) has no tensor that shows its number of samples",
        key="task",
        remedy=f"Override num_samples(batch) in {task} and return their number.",
    )


def contents(batch: Any) -> str:
    """Return the type of a batch and of its entries: "dict with ids: list, labels: int64 [64]"."""
    items = batch.items() if isinstance(batch, Mapping) else enumerate(batch) if isinstance(batch, list | tuple) else ()
    entries = ", ".join(f"{name}: {_type(item)}" for name, item in list(items)[:10])
    return f"{type(batch).__name__} with {entries}" if entries else _type(batch)


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__
