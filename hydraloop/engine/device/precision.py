"""Autocast and gradient scaling behind one face. fp32 needs neither, and costs nothing here.

The order is the same for all of them: `forward` and `backward`, several times in an accumulation window, then once
`unscale`, whatever looks at gradients or clips them, and `step`, which says whether it was taken.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, optim

from hydraloop.errors import UserError, suggestion

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class Precision:
    """fp32: forward as it is, backward as it is, every optimizer step is taken."""

    name: str = "fp32"
    dtype: torch.dtype | None = None
    """What autocast computes in; None: the tensors' own."""
    skipped: int = 0
    """Optimizer steps skipped so far, those of the resumed run included; only fp16 skips."""

    def active(self) -> AbstractContextManager[None]:
        """What holds for a whole run, training and evaluation; undone at its end, whatever happens."""
        return nullcontext()

    def forward(self, function: Callable[..., _Result]) -> Callable[..., _Result]:
        """The callable to use in place of `function`, a forward pass (the task's `forward` or its `evaluate`).

        Here the function itself, without anything around it.
        """
        return function

    def backward(self, loss: Tensor, riding: tuple[Tensor, Tensor] | None = None) -> None:
        """Backpropagate a scalar `loss`, scaled where the precision needs it. No host sync.

        Args:
            riding: a leaf and the gradient it gets in the same pass, unscaled (`Window.riding`).
        """
        if riding is None:
            torch.autograd.backward(loss)
        else:
            leaf, gradient = riding
            torch.autograd.backward((loss, leaf), (None, gradient))

    def unscale(self, optimizer: optim.Optimizer) -> None:
        """Bring gradients back to their true size, once before each `step`. No host sync."""

    def step(self, optimizer: optim.Optimizer) -> bool:
        """Take the optimizer step. Returns whether it was taken: fp16 skips one whose gradients overflowed."""
        optimizer.step()
        return True

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, as plain values (fp16: the scale)."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned; of another precision, nothing."""


class TF32(Precision):
    """fp32 whose matrix products and convolutions round their inputs to TensorFloat-32 (10 bits of mantissa).

    Tensors stay fp32. Only hardware that has TF32 (CUDA from compute capability 8.0, some CPUs) is any faster.
    """

    name = "tf32"

    @contextmanager
    def active(self) -> Iterator[None]:
        """torch's process-wide settings for the run, and what they were before after it."""
        # Not by torch's newer names, `fp32_precision`: with those set, `torch.get_float32_matmul_precision` raises, and
        # others call it.
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
        """The function under autocast; costs 2.3 µs a call on a CPU.

        Leaving it forgets the casts of the parameters, so an optimizer step or a swap of weights between two calls is
        seen by the second.
        """
        device_type, dtype = self.device.type, self.dtype

        def under_autocast(*args: Any, **kwargs: Any) -> _Result:
            # One context kept for all calls would save 0.7 µs, and leave autocast on after a nested call: it remembers
            # what to restore in itself.
            with torch.autocast(device_type, dtype):
                return function(*args, **kwargs)

        return under_autocast


_OPTIONS = {
    "fp32": frozenset[str](),
    "tf32": frozenset[str](),
    "bf16": frozenset[str](),
    "fp16": frozenset({"init_scale", "growth_factor", "backoff_factor", "growth_interval", "min_scale"}),
}


def make_precision(options: Mapping[str, Any], device: torch.device) -> Precision:
    """The precision that the config's group `precision` describes.

    Args:
        options: `name` (fp32, tf32, bf16, fp16) and that precision's own options.
        device: where the run computes.

    Raises:
        UserError: there is no such precision, it has no such option, the device cannot do it, or a value is out of
            range; names the key.
    """
    own = {str(option): value for option, value in options.items()}
    name = own.pop("name", None)
    if name not in _OPTIONS:
        raise UserError(
            f"{name!r} is unknown", key="precision.name", remedy=suggestion(str(name), _OPTIONS) + " precision=fp32."
        )
    for option in own.keys() - _OPTIONS[name]:
        raise UserError(
            f"{name} has no such option", key=f"precision.{option}", remedy=suggestion(option, _OPTIONS[name])
        )
    if name == "fp16":
        if device.type == "cpu":
            log.warning("precision=fp16 on a CPU is up to fifty times as slow as fp32; bf16 is not")
        from hydraloop.engine.device.grad_scaling import FP16  # it builds on this module

        return FP16(device, **own)
    if name == "bf16":
        return Autocast(device)
    return TF32() if name == "tf32" else Precision()


def _check_autocast(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Ask torch itself: where the device lacks the type, `autocast` raises, or warns and does nothing."""
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
    if (
        device.type == "cuda"
        and dtype is torch.bfloat16
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        log.warning("precision=bf16: this GPU only emulates bfloat16, which is slow; precision=fp16 is faster on it")
