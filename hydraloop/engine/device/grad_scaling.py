"""fp16: the loss is scaled so that gradients fit into float16, and steps whose gradients overflowed are skipped."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, optim

from hydraloop.engine.device.precision import Autocast
from hydraloop.errors import UserError


class FP16(Autocast):
    """fp16: autocast to float16, and a loss scale that keeps gradients inside its range (6e-8 .. 65504).

    The loss is multiplied by the scale, and gradients are divided by it before anything looks at them. If one of them
    is infinite or NaN then, the step is skipped and the scale lowered; after a number of good steps it is raised
    (Micikevicius et al., Mixed Precision Training, 2018; `torch.amp.GradScaler`).

    Args:
        device: where the run computes.
        init_scale: the first scale, at least `min_scale`.
        growth_factor: what the scale is multiplied by after `growth_interval` steps, above 1.
        backoff_factor: what the scale is multiplied by after a skipped step, above 0 and at most 0.99.
        growth_interval: consecutive good steps before the scale grows, from 1.
        min_scale: a scale below it ends the run, from 1e-30.

    Raises:
        UserError: torch has no autocast to float16 for the device, or an option is out of range.
    """

    name = "fp16"
    dtype = torch.float16

    def __init__(
        self,
        device: torch.device,
        *,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float = 1e-4,
    ) -> None:
        super().__init__(device)
        # A scale that is subnormal in fp32, or lowered by next to nothing, could stay the same, and `step` not see it.
        _check_range("min_scale", min_scale, 1e-30 <= min_scale < math.inf, "from 1e-30, and at most init_scale")
        _check_range("init_scale", init_scale, min_scale <= init_scale <= 1e38, "from min_scale to 1e38")
        _check_range("growth_factor", growth_factor, 1 < growth_factor < math.inf, "above 1")
        _check_range("backoff_factor", backoff_factor, 0 < backoff_factor <= 0.99, "above 0, at most 0.99")
        _check_range("growth_interval", growth_interval, growth_interval >= 1, "1 or more")
        self._growth_factor, self._backoff_factor = growth_factor, backoff_factor
        self._growth_interval, self._min_scale = growth_interval, min_scale
        self.skipped = 0
        self._start(init_scale, good_steps=0)

    def _start(self, scale: float, *, good_steps: int) -> None:
        """A scaler that stands at a scale and at a number of good steps since it changed."""
        self.scale = torch.tensor(scale, dtype=torch.float32).item()  # as the device will have it
        """The loss scale, as the host knows it; reading it is no sync."""
        self._scaler = torch.amp.GradScaler(
            self.device.type, self.scale, self._growth_factor, self._backoff_factor, self._growth_interval
        )
        # The key of the state dict; torch has no function that sets the number.
        self._scaler.load_state_dict({**self._scaler.state_dict(), "_growth_tracker": good_steps})
        self._unscaled = self._has_gradients = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Nothing for the run; one that ended between `unscale` and `step` leaves nothing to the next one."""
        try:
            yield
        finally:
            if self._unscaled:
                self._start(**self._position())

    def backward(self, loss: Tensor, riding: tuple[Tensor, Tensor] | None = None) -> None:
        """Backpropagate the loss times the scale; `riding` as it is. No host sync."""
        super().backward(self._scaler.scale(loss), riding)

    def unscale(self, optimizer: optim.Optimizer) -> None:
        """Divide the gradients by the scale and look for overflows, once before each `step`. No host sync.

        Where gradients are sharded (DTensor), torch reduces over the mesh whether there was an overflow: a collective.
        All ranks then skip the same steps; with DDP they do since they have the same gradients.
        """
        self._has_gradients = any(
            parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"]
        )
        if self._has_gradients:
            self._scaler.unscale_(optimizer)
        self._unscaled = True

    def step(self, optimizer: optim.Optimizer) -> bool:
        """Take the step unless gradients overflowed, and adapt the scale. One host sync, and no way around it.

        The host has to know whether the step was taken, since schedules, averages and counters move only then. The
        scale tells: it is lowered after an overflow and only then. So it is updated first, and the optimizer is
        called as in fp32 or not at all. `GradScaler.step` has the same sync for most optimizers; a fused one it always
        calls, and says to nobody whether its kernel did anything.

        Raises:
            UserError: the scale fell below `min_scale`: gradients are not finite at any scale.
        """
        if not self._unscaled:
            self.unscale(optimizer)
        self._unscaled = False
        if self._has_gradients:
            before = self.scale
            self._scaler.update()
            self.scale = self._scaler.get_scale()
            if self.scale < before:
                self.skipped += 1
                self._check_scale()
                return False
        optimizer.step()
        return True

    def _check_scale(self) -> None:
        if self.scale < self._min_scale:
            raise UserError(
                f"gradients are infinite or NaN even at a loss scale of {self.scale:.2g} ({self.skipped} steps skipped "
                f"so far), as if the loss itself were; every further step would be skipped",
                key="precision.min_scale",
                remedy="Lower optimizer.lr, clip gradients (default_hooks.grad_clip.max_norm=1), or use "
                "precision=bf16, which has the range of fp32; precision=fp32 shows whether the loss is finite.",
            )

    def _position(self) -> dict[str, Any]:
        return {"scale": self.scale, "good_steps": self._scaler.state_dict()["_growth_tracker"]}

    def state_dict(self) -> dict[str, Any]:
        """The scale, how many good steps it has had, the steps skipped. A host sync."""
        return {**self._position(), "skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at the saved scale, with this run's options; where another precision was saved, at its own start."""
        if state:
            self._start(state["scale"], good_steps=state["good_steps"])
            self.skipped = state["skipped"]


def _check_range(option: str, value: float, within: bool, allowed: str) -> None:
    if not within:
        raise UserError(f"{value} is out of range", key=f"precision.{option}", remedy=f"Use a number {allowed}.")
