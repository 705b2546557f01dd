"""Averages of a model's weights: the weight of each update, and the averaged tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hydraloop.engine.distributed.fsdp import local, part_of, sharded_like
from hydraloop.errors import UserError, suggestion
from hydraloop.hooks.shared.option_checks import check_above_zero, check_at_least

Weighting = Callable[[int], float]
"""Maps the number of updates done (at least 1: the first is a copy) to the weight of the new values, in (0, 1]."""

EMA_TYPES: tuple[str, ...] = ("exponential", "stochastic", "momentum_annealing", "exp_momentum", "linear_momentum")
DEFAULT_GAMMA: dict[str, float] = {"momentum_annealing": 100.0, "exp_momentum": 2000.0}
"""Defaults of MMEngine's MomentumAnnealingEMA and MMDetection's ExpMomentumEMA."""
DEFAULT_WARM_UP = 100
"""For `linear_momentum`; MMDetection's default."""


def weighting(
    ema_type: str,
    *,
    momentum: float = 0.0002,
    warmup: bool = True,
    gamma: float | None = None,
    warm_up: int = DEFAULT_WARM_UP,
    interval: int = 1,
) -> Weighting:
    """Return the weight of the new values as a function of the updates done: `average += weight * (new - average)`.

    With u updates done and s = u * interval, the optimizer steps since the first update, which MMEngine calls `steps`:

    * `exponential`: `momentum`; with `warmup` max(momentum, 9 / (10 + u)), so that the average of a short run does not
      consist of its initial weights (TensorFlow's ExponentialMovingAverage with num_updates).
    * `stochastic`: 1 / (1 + u), the plain mean (Izmailov et al., 2018; MMEngine's StochasticWeightAverage).
    * `momentum_annealing`: max(momentum, gamma / (gamma + s)) (MMEngine's MomentumAnnealingEMA).
    * `exp_momentum`: momentum + (1 - momentum) * exp(-(1 + s) / gamma) (MMDetection's ExpMomentumEMA, from YOLOX).
    * `linear_momentum`: min(momentum, (1 + s) / (warm_up + s)) (MMDetection's LinearMomentumEMAHook). It grows towards
      `momentum` only if that is above 1 / warm_up; the default momentum is below and stays constant. Two differences
      from MMDetection: its bound is momentum ** interval, which would nearly stop the average here, where `momentum` is
      the share of the new weights; and its average begins with the weights before the first step, not with those of the
      first update.

    Raises:
        UserError: an unknown type, a number out of range, or an option of another type.
    """
    if ema_type not in EMA_TYPES:
        remedy = suggestion(str(ema_type), EMA_TYPES)
        raise UserError(f"there is no ema_type {ema_type!r}", key="ema_type", remedy=remedy)
    if not 0.0 < momentum < 1.0:
        raise UserError(
            f"{momentum} is not between 0 and 1",
            key="momentum",
            remedy="It is the share of the new weights in each update: 0.0002, not 0.9998.",
        )
    scale = DEFAULT_GAMMA.get(ema_type, 1.0) if gamma is None else gamma
    check_above_zero(gamma=gamma)
    check_at_least(1, warm_up=warm_up)
    _check_used(ema_type, gamma, warm_up)

    weights: dict[str, Weighting] = {
        "exponential": lambda u: max(momentum, 9.0 / (10.0 + u)) if warmup else momentum,
        "stochastic": lambda u: 1.0 / (1.0 + u),
        "momentum_annealing": lambda u: max(momentum, scale / (scale + u * interval)),
        "exp_momentum": lambda u: momentum + (1.0 - momentum) * math.exp(-(1.0 + u * interval) / scale),
        "linear_momentum": lambda u: min(momentum, (1.0 + u * interval) / (warm_up + u * interval)),
    }
    return weights[ema_type]


def _check_used(ema_type: str, gamma: float | None, warm_up: int) -> None:
    """Reject options that have no effect for this type."""
    if gamma is not None and ema_type not in DEFAULT_GAMMA:
        raise UserError(
            f"the ema_type {ema_type} has no gamma",
            key="gamma",
            remedy=f"Leave it out, or use {' or '.join(DEFAULT_GAMMA)}.",
        )
    if warm_up != DEFAULT_WARM_UP and ema_type != "linear_momentum":
        raise UserError(
            f"the ema_type {ema_type} has no warm_up",
            key="warm_up",
            remedy="Leave it out, or use linear_momentum. For exponential there is `warmup` (true or false).",
        )


class Averaged:
    """Averages of a model's tensors, in float32 or wider. Shared tensors are averaged once, shards on their ranks.

    The parameters (and buffers) are those that the model has at construction. Their values may change in place;
    `rebind` finds replaced storages.

    Args:
        model: its tensors are averaged; only `swapped_in` changes it.
        buffers: also average floating-point buffers, and copy the others.
    """

    def __init__(self, model: nn.Module, *, buffers: bool) -> None:
        own = {id(parameter) for parameter in model.parameters()}
        if buffers:
            own.update(id(buffer) for buffer in model.buffers())
        # The state dict has a shared tensor under each of its names.
        named = {key: value for key, value in model.state_dict(keep_vars=True).items() if id(value) in own}
        self._tensors = list({id(tensor): tensor for tensor in named.values()}.values())
        self._position = {id(tensor): index for index, tensor in enumerate(self._tensors)}
        self._index_of = {key: self._position[id(tensor)] for key, tensor in named.items()}
        self._averages: list[Tensor] = []
        self._floats: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._narrow: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._others: tuple[list[Tensor], list[Tensor]] = ([], [])

    def average_of(self, tensor: Tensor) -> Tensor | None:
        """Return the average of one of the model's tensors (of this rank's shard), not a copy; None before `start`."""
        index = self._position.get(id(tensor))
        return None if index is None or not self._averages else self._averages[index]

    def start(self) -> None:
        """Begin with copies of the model's current values."""
        self._averages = [local(tensor).to(_wide(tensor), copy=True) for tensor in self._tensors]
        self.rebind()

    def rebind(self) -> None:
        """Find the model's storages again; needed only if a parameter's `.data` was replaced."""
        if not self._averages:
            return
        # Detached views, made once: updating them needs no no_grad(), which takes longer than the rest of `update`.
        pairs = [(average, local(tensor)) for average, tensor in zip(self._averages, self._tensors, strict=True)]
        floats = [pair for pair in pairs if _is_float(pair[1])]
        self._floats = _unzip([pair for pair in floats if pair[0].dtype == pair[1].dtype])
        self._narrow = _unzip([pair for pair in floats if pair[0].dtype != pair[1].dtype])
        self._others = _unzip([pair for pair in pairs if not _is_float(pair[1])])

    def update(self, weight: float) -> None:
        """Move every average towards the model's value: `average += weight * (value - average)`. No host sync."""
        averages, values = self._floats
        if averages:
            # Beta in torch; on a GPU, a few kernels instead of one per tensor.
            torch._foreach_lerp_(averages, values, weight)
        averages, values = self._narrow
        if averages:
            # lerp needs equal dtypes.
            torch._foreach_mul_(averages, 1.0 - weight)
            torch._foreach_add_(averages, values, alpha=weight)
        averages, values = self._others
        if averages:
            torch._foreach_copy_(averages, values)

    def replace(self, formula: Callable[[Tensor, Tensor], Tensor | None]) -> None:
        """Set every average to `formula(average, value)`; None: it has changed the average. Integers are copied."""
        for averages, values in (self._floats, self._narrow):
            for average, value in zip(averages, values, strict=True):
                new = formula(average, value.to(average.dtype))
                if new is not None:
                    average.copy_(new)
        averages, values = self._others
        if averages:
            torch._foreach_copy_(averages, values)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Copy the averages into the model; at the end, also after an error, restore its values from a second copy."""
        values = [local(tensor) for tensor in self._tensors]
        own = [value.clone() for value in values]
        try:
            torch._foreach_copy_(values, self._averages)
            yield
        finally:
            torch._foreach_copy_(values, own)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averages (not copies) by state-dict key, sharded like the model; empty before `start`."""
        if not self._averages:
            return {}
        named = self._index_of.items()
        return {key: sharded_like(self._averages[index], self._tensors[index]) for key, index in named}

    def load_state_dict(self, state: Mapping[str, Tensor], *, strict: bool, key: str) -> None:
        """Load averages; if not strict, missing ones begin with the model's current value. Without any, forget them.

        Raises:
            UserError: with `strict`, an entry is missing or unknown; names it and `key`.
        """
        if not state:  # saved before `start`
            self._averages = []
            return
        missing, unknown = self._index_of.keys() - state.keys(), state.keys() - self._index_of.keys()
        if strict and (missing or unknown):
            what = "no average of" if missing else "an unknown average, of"
            raise UserError(
                f"the checkpoint has {what} {min(missing or unknown)}",
                key=key,
                remedy="Use the model and the options of the run (update_buffers), or resume_strict=false.",
            )
        self.start()
        for name, index in self._index_of.items():
            if name in state:
                self._averages[index].copy_(part_of(state[name], self._tensors[index]))


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _wide(tensor: Tensor) -> torch.dtype:
    """Return at least float32: 16 bits would round an update of 0.0002 of the difference to nothing."""
    return torch.promote_types(tensor.dtype, torch.float32) if _is_float(tensor) else tensor.dtype


def _unzip(pairs: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    return [first for first, _ in pairs], [second for _, second in pairs]
