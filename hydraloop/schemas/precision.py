"""The group `precision`: the number format of the forward and backward pass. Parameters are always fp32."""

from dataclasses import dataclass
from typing import Optional

from hydra.core.config_store import ConfigStore


@dataclass
class FP32Conf:
    """`precision=fp32`, the default: single precision, without changes to torch; the reference for the others."""

    name: str = "fp32"
    """The name of the precision."""


@dataclass
class TF32Conf:
    """`precision=tf32`: fp32 tensors, but matrix products and convolutions compute with a 10-bit mantissa.

    Several times faster on NVIDIA GPUs since Ampere; elsewhere mostly the same as fp32. torch's setting applies to the
    whole process and is restored after the run."""

    name: str = "tf32"
    """The name of the precision."""


@dataclass
class BF16Conf:
    """`precision=bf16`: forward and evaluation under autocast to bfloat16.

    bfloat16 has the range of fp32 and a 7-bit mantissa. The first choice if the hardware supports it: nothing to tune,
    and no skipped steps."""

    name: str = "bf16"
    """The name of the precision."""


@dataclass
class FP16Conf:
    """`precision=fp16`: autocast to float16, for GPUs without bfloat16. The loss is scaled to keep gradients in range.

    Steps whose gradients overflow are skipped, counted and logged. Costs one host sync per optimizer step, because
    schedules, averages and counters advance only if the step was taken. CPUs support it too, but most are far slower
    than with fp32."""

    name: str = "fp16"
    """The name of the precision."""
    init_scale: float = 65536.0
    """Initial factor of the loss, `min_scale` .. 1e38. torch's default, which is rather large: a few skipped steps
    reduce it, while a small one would lose gradients unnoticed for thousands of steps."""
    growth_factor: float = 2.0
    """Factor of the scale after `growth_interval` steps without an overflow, above 1. torch's default; a power of two
    changes no bit of a mantissa."""
    backoff_factor: float = 0.5
    """Factor of the scale after an overflow, above 0, at most 0.99. torch's default; it reverses one growth."""
    growth_interval: int = 2000
    """Optimizer steps without an overflow before the scale grows, at least 1. torch's default: at most one step in 2000
    is skipped to find the limit."""
    min_scale: float = 1e-4
    """Scale below which the run ends with an error, 1e-30 .. `init_scale`. From 65536 this takes 30 overflows in a row:
    then the loss itself is not finite, and all further steps would be skipped silently."""
    loss_scale: Optional[float] = None
    """A fixed factor of the loss, 1e-30 .. 1e38. It never grows and never backs off; an overflow skips the step, and 30
    in a row end the run. The other options are then not used. Null, torch's default: the factor is adapted, so that
    there is nothing to tune."""


def register(store: ConfigStore) -> None:
    """Store the options of the group `precision`."""
    for schema in (FP32Conf, TF32Conf, BF16Conf, FP16Conf):
        store.store(group="precision", name=schema.name, package="precision", node=schema)
