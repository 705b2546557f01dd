"""The averages of a model's tensors: kept, updated, copied into the model for an evaluation, saved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from hydraloop.engine.distributed.fsdp import local, part_of, sharded_like
from hydraloop.errors import UserError


class AveragedTensors:
    """Averages of a model's tensors, in float32 or wider. Shared tensors are averaged once, shards on their ranks.

    The tensors are those that the model has when it is given to `follow`. Their values may change in place; `rebind`
    finds replaced storages.

    Args:
        buffers: also average floating-point buffers. Integer and boolean buffers and those of parametrizations are
            copied.
    """

    def __init__(self, *, buffers: bool) -> None:
        self._with_buffers = buffers
        self._named: dict[str, Tensor] = {}
        """The model's tensors by state-dict key. A shared tensor is there under each of its names."""
        self._tensors: dict[int, Tensor] = {}
        """The model's tensors by id, each of them once."""
        self._averages: dict[int, Tensor] = {}
        """By the id of the model's tensor, in the same order; empty before `start`."""
        self._never_averaged: set[int] = set()
        """Ids of the model's buffers that are copied, also if they are floating-point."""
        # Lists of averages and of the model's values, grouped by the operation that updates them.
        self._of_same_dtype: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._of_narrow_dtype: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._copied: tuple[list[Tensor], list[Tensor]] = ([], [])

    def follow(self, model: nn.Module) -> None:
        """Find the tensors to average. The model that is followed already keeps its averages."""
        averaged = {id(parameter) for parameter in model.parameters()}
        if self._with_buffers:
            averaged.update(id(buffer) for buffer in model.buffers())
            self._never_averaged = {id(buffer) for buffer in _of_parametrizations(model)}
        state = model.state_dict(keep_vars=True)
        self._named = {key: tensor for key, tensor in state.items() if id(tensor) in averaged}
        self._tensors = {id(tensor): tensor for tensor in self._named.values()}

    def average_of(self, tensor: Tensor) -> Tensor | None:
        """Return the average of one of the model's tensors (of this rank's shard), not a copy; None before `start`."""
        return self._averages.get(id(tensor))

    def start(self) -> None:
        """Begin with copies of the model's current values."""
        self._averages = {key: local(tensor).to(_wide(tensor), copy=True) for key, tensor in self._tensors.items()}
        self.rebind()

    def rebind(self) -> None:
        """Find the model's storages again; needed only if a parameter's `.data` was replaced."""
        self._of_same_dtype = ([], [])
        self._of_narrow_dtype = ([], [])
        self._copied = ([], [])
        for key, average in self._averages.items():
            # A detached view, made once: updating it needs no no_grad(), which takes longer than the rest of `update`.
            value = local(self._tensors[key])
            if not _is_float(value) or key in self._never_averaged:
                averages, values = self._copied
            elif average.dtype == value.dtype:
                averages, values = self._of_same_dtype
            else:
                averages, values = self._of_narrow_dtype
            averages.append(average)
            values.append(value)

    def update(self, share: float) -> None:
        """Move every average towards the model's value: `average += share * (value - average)`. No host sync."""
        averages, values = self._of_same_dtype
        if averages:
            # Beta in torch; on a GPU, a few kernels instead of one per tensor.
            torch._foreach_lerp_(averages, values, share)
        averages, values = self._of_narrow_dtype
        if averages:
            # lerp needs equal dtypes.
            torch._foreach_mul_(averages, 1.0 - share)
            torch._foreach_add_(averages, values, alpha=share)
        self._copy_others()

    def replace(self, formula: Callable[[Tensor, Tensor, int], Tensor | None], updates: int) -> None:
        """Set every average to `formula(average, value, updates)`; None: it has changed the average. Others are copied.

        Args:
            formula: called for each floating-point tensor.
            updates: updates done, at least 1.
        """
        for averages, values in (self._of_same_dtype, self._of_narrow_dtype):
            for average, value in zip(averages, values, strict=True):
                new = formula(average, value.to(average.dtype), updates)
                if new is not None:
                    average.copy_(new)
        self._copy_others()

    def _copy_others(self) -> None:
        averages, values = self._copied
        if averages:
            torch._foreach_copy_(averages, values)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Copy the averages into the model; at the end, also after an error, restore its values from a second copy."""
        values = [local(tensor) for tensor in self._tensors.values()]
        own = [value.clone() for value in values]
        try:
            torch._foreach_copy_(values, list(self._averages.values()))
            yield
        finally:
            torch._foreach_copy_(values, own)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averages (not copies) by state-dict key, sharded like the model; empty before `start`."""
        if not self._averages:
            return {}
        return {key: sharded_like(self._averages[id(tensor)], tensor) for key, tensor in self._named.items()}

    def load_state_dict(self, state: Mapping[str, Tensor], *, strict: bool, key: str) -> None:
        """Load averages; if not strict, missing ones begin with the model's current value. Without any, forget them.

        Raises:
            UserError: with `strict`, an entry is missing or unknown; names it and `key`.
        """
        if not state:  # saved before `start`
            self._averages = {}
            return
        missing = self._named.keys() - state.keys()
        unknown = state.keys() - self._named.keys()
        if strict and (missing or unknown):
            what = "no average of" if missing else "an unknown average, of"
            raise UserError(
                f"the checkpoint has {what} {min(missing or unknown)}",
                key=key,
                remedy="Use the model and the options of the run (update_buffers), or resume_strict=false.",
            )
        self.start()
        for name, tensor in self._named.items():
            if name in state:
                self._averages[id(tensor)].copy_(part_of(state[name], tensor))


def _of_parametrizations(model: nn.Module) -> Iterator[Tensor]:
    """Yield the buffers of parametrizations. A mean of them is not one of them: the mean of unit vectors is shorter."""
    for module in model.modules():
        if isinstance(module, ParametrizationList):
            yield from module.buffers()
        # The older spectral_norm, and pruning: next to the parameter weight_orig are the buffers weight_u, weight_mask.
        own = [name for name, _ in module.named_parameters(recurse=False)]
        beginnings = tuple(name.removesuffix("orig") for name in own if name.endswith("_orig"))
        for name, buffer in module.named_buffers(recurse=False):
            if name.startswith(beginnings):
                yield buffer


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _wide(tensor: Tensor) -> torch.dtype:
    """Return at least float32: 16 bits would round an update of 0.0002 of the difference to nothing."""
    return torch.promote_types(tensor.dtype, torch.float32) if _is_float(tensor) else tensor.dtype
