"""fp32, tf32, bf16 and fp16: autocast, gradient scaling and the optimizer step, as one interface (`Precision`).

The order of calls: `forward` and `backward`, several times in an accumulation window; then `unscale` once; then
anything that clips or reads gradients; then `step`, which returns whether the step was taken, or `skip`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, optim

from hydraloop.errors import UserError, suggestion

_Result = TypeVar("_Result")
_MOST_SKIPPED = 30
"""Steps that a fixed scale may skip in a row: about as many as lower the default scale below `min_scale`."""


class Precision:
    """fp32: forward and backward as they are; every optimizer step is taken."""

    name: str = "fp32"
    dtype: torch.dtype | None = None
    """The dtype in which autocast computes; None: that of the tensors."""
    skipped: int = 0
    """Optimizer steps skipped until now, in the whole run: by fp16, or by `skip_step`."""
    diverged: bool = False
    """Whether gradients are not finite at any loss scale, so that fp16 has ended the run."""

    def active(self) -> AbstractContextManager[None]:
        """Return a context for the whole run; at its end, process-wide settings are restored."""
        return nullcontext()

    def forward(self, function: Callable[..., _Result]) -> Callable[..., _Result]:
        """Return the task's `forward` or `evaluate` as this precision calls it; in fp32, unchanged."""
        return function

    backward: Callable[[Tensor], None] = staticmethod(torch.autograd.backward)
    """Backpropagate a scalar loss, scaled if the precision needs it. No host sync."""

    def unscale(self, optimizer: optim.Optimizer) -> None:
        """Bring gradients back to their true size, once before each `step`. No host sync."""

    def step(self, optimizer: optim.Optimizer) -> bool:
        """Take the optimizer step. Return whether it was taken: fp16 skips it if gradients overflowed."""
        optimizer.step()
        return True

    def skip(self) -> None:
        """Count a step that a hook has skipped; called instead of `step`."""
        self.skipped += 1

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for a resumed run: the steps skipped (fp16: also the scale)."""
        return {"skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned; of the state of another precision, only the steps skipped."""
        self.skipped = state["skipped"]


class TF32(Precision):
    """fp32, but matrix products and convolutions round their inputs to TensorFloat-32 (10 bits of mantissa).

    Tensors stay fp32. It is faster only on hardware that has TF32 (CUDA from compute capability 8.0, some CPUs).
    """

    name = "tf32"

    @contextmanager
    def active(self) -> Iterator[None]:
        """Change torch's process-wide settings for the run, and restore them."""
        # Not torch's newer `fp32_precision`, with which `torch.get_float32_matmul_precision` raises for other callers.
        matmul, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        try:
            torch.set_float32_matmul_precision("high")
            torch.backends.cudnn.allow_tf32 = True
            yield
        finally:
            torch.set_float32_matmul_precision(matmul)
            torch.backends.cudnn.allow_tf32 = convolutions


class Autocast(Precision):
    """bf16: the forward pass under `torch.autocast`; parameters, gradients and the optimizer stay fp32.

    bfloat16 has the range of fp32, so gradients need no scaling.

    Args:
        device: where the run computes.

    Raises:
        UserError: torch has no autocast to bfloat16 for the device.
    """

    name = "bf16"
    dtype: torch.dtype = torch.bfloat16

    def __init__(self, device: torch.device) -> None:
        _check_autocast(self.name, device, self.dtype)
        self.device = device

    def forward(self, function: Callable[..., _Result]) -> Callable[..., _Result]:
        """Return the function under autocast; costs 2.3 µs a call on a CPU.

        Each call casts the parameters again, so that it uses what an optimizer step or a swap of weights has changed.
        """
        device_type, dtype = self.device.type, self.dtype

        def under_autocast(*args: Any, **kwargs: Any) -> _Result:
            # One context for all calls would save 0.7 µs, but a nested call would then leave autocast on.
            with torch.autocast(device_type, dtype):
                return function(*args, **kwargs)

        return under_autocast


class FP16(Autocast):
    """fp16: autocast to float16, with a loss scale that keeps gradients inside its range (6e-8 .. 65504).

    The loss is multiplied by the scale, and gradients are divided by it before anything reads them. If a gradient is
    infinite or NaN, the step is skipped and the scale lowered. After `growth_interval` good steps, it is raised
    (Micikevicius et al., Mixed Precision Training, 2018; `torch.amp.GradScaler`).

    Args:
        device: where the run computes.
        init_scale: the first scale, at least `min_scale`.
        growth_factor: the scale is multiplied by it after `growth_interval` good steps; above 1.
        backoff_factor: the scale is multiplied by it after a skipped step; above 0, at most 0.99.
        growth_interval: consecutive good steps before the scale grows; 1 or more.
        min_scale: a lower scale ends the run; 1e-30 or more.
        loss_scale: a fixed scale, 1e-30 .. 1e38; the other options are not used. 30 skipped steps in a row end the
            run. None: the scale is adapted.

    Raises:
        UserError: torch has no autocast to float16 for the device.
        AssertionError: of torch, `growth_factor` or `backoff_factor` is out of range.
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
        loss_scale: float | None = None,
    ) -> None:
        super().__init__(device)
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._min_scale = min_scale
        self._fixed = loss_scale
        self.skipped = 0
        self._skipped_in_a_row = 0
        self._start(init_scale, good_steps=0)

    def _start(self, scale: float, *, good_steps: int) -> None:
        """Make a scaler with this scale, or the fixed one, after `good_steps` good steps at this scale."""
        scale = scale if self._fixed is None else self._fixed
        self.scale = torch.tensor(scale, dtype=torch.float32).item()  # as the device will have it
        """The loss scale on the host; reading it does not synchronize."""
        self._scaler = torch.amp.GradScaler(
            self.device.type, self.scale, self._growth_factor, self._backoff_factor, self._growth_interval
        )
        # torch has no function that sets this number, only the state dict.
        self._scaler.load_state_dict({**self._scaler.state_dict(), "_growth_tracker": good_steps})
        self._unscaled = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Reset the scaler if the run ends between `unscale` and `step`."""
        try:
            yield
        finally:
            if self._unscaled:
                self.load_state_dict(self.state_dict())

    def backward(self, loss: Tensor) -> None:
        """Backpropagate the loss times the scale. No host sync."""
        torch.autograd.backward(self._scaler.scale(loss))

    def unscale(self, optimizer: optim.Optimizer) -> None:
        """Divide the gradients by the scale and look for overflows, once before each `step`. No host sync.

        All ranks skip the same steps: with DDP they have the same gradients; with sharded gradients (DTensors), torch
        reduces over all ranks whether there was an overflow (a collective).
        """
        self._scaler.unscale_(optimizer)
        self._unscaled = True

    def step(self, optimizer: optim.Optimizer) -> bool:
        """Take the step unless gradients overflowed, and adapt the scale. One host sync, which cannot be avoided.

        Schedules, averages and counters advance only if the step was taken, so the host has to know.
        `GradScaler.step` does not say whether a fused optimizer took the step. But the scale falls exactly after an
        overflow, so it is updated first, and the optimizer is called only if it has not fallen.

        Raises:
            UserError: the scale is below `min_scale`, or a fixed scale has skipped 30 steps in a row.
        """
        if self._overflowed():
            return False
        optimizer.step()
        return True

    def skip(self) -> None:
        """Count a step that a hook has skipped, and adapt the scale to its gradients. One host sync.

        Raises:
            UserError: as in `step`.
        """
        if not self._overflowed():  # which counts a step whose gradients overflowed
            self.skipped += 1

    def _overflowed(self) -> bool:
        """Adapt the scale to the gradients, and return whether they overflowed. The step then counts as skipped."""
        self._unscaled = False
        before = self.scale
        self._scaler.update()
        adapted = self._scaler.get_scale()
        if self._fixed is None:
            self.scale = adapted
        else:
            self._scaler.update(before)
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if adapted < before else 0
        if adapted < before:
            self.skipped += 1
            if self._skipped_in_a_row >= _MOST_SKIPPED if self._fixed else adapted < self._min_scale:
                self.diverged = True
                raise UserError(
                    f"gradients are infinite or NaN even at a loss scale of {self.scale:.2g} ({self.skipped} steps "
                    "skipped); the loss may be, too, and every further step would be skipped",
                    key="precision.loss_scale" if self._fixed else "precision.min_scale",
                    remedy="Lower optimizer.lr, clip gradients (default_hooks.grad_clip.max_norm=1), or use "
                    "precision=bf16, which has the range of fp32; precision=fp32 shows whether the loss is finite.",
                )
        return adapted < before

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, its good steps, and the steps skipped. A host sync."""
        good_steps = self._scaler.state_dict()["_growth_tracker"]
        return {"scale": self.scale, "good_steps": good_steps, "skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the saved or the fixed scale with this run's options; another precision has no scale."""
        super().load_state_dict(state)
        if "scale" in state:
            self._start(state["scale"], good_steps=state["good_steps"])


def make_precision(options: Mapping[str, Any], device: torch.device) -> Precision:
    """Return the precision of the config group `precision`.

    Args:
        options: `name` (fp32, tf32, bf16, fp16) and the options of that precision.
        device: where the run computes.

    Raises:
        UserError: an unknown precision, or one that the device lacks.
    """
    arguments = {str(option): value for option, value in options.items()}
    name = arguments.pop("name", None)
    if name not in _CLASSES:
        remedy = suggestion(str(name), _CLASSES) + " Select one with precision=fp32."
        raise UserError(f"{name!r} is unknown", key="precision.name", remedy=remedy)
    chosen = _CLASSES[name]
    return chosen(device, **arguments) if issubclass(chosen, Autocast) else chosen()


_CLASSES: dict[Any, type[Precision]] = {"fp32": Precision, "tf32": TF32, "bf16": Autocast, "fp16": FP16}


def _check_autocast(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse a type that the device lacks. torch's `autocast` then raises, or warns and does nothing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.autocast(device.type, dtype)
    except (RuntimeError, AssertionError, Warning) as error:
        raise UserError(
            f"{device.type} has no {name}: {' '.join(str(error).split())}",
            key="precision",
            remedy="Use precision=fp32, or another engine.device.",
        ) from error
