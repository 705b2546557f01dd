"""The group `precision`: what the forward and backward pass compute in. Parameters stay fp32 in all of them."""

from dataclasses import dataclass

from hydra.core.config_store import ConfigStore


@dataclass
class FP32Conf:
    """`precision=fp32`, the default: single precision, torch as it is; the reference for every other one."""

    name: str = "fp32"
    """The name of the precision."""


@dataclass
class TF32Conf:
    """`precision=tf32`: fp32 tensors, but matrix products and convolutions keep 10 bits of mantissa inside.

    On NVIDIA GPUs since Ampere several times as fast; elsewhere mostly the same as fp32. torch's setting is that of the
    whole process, and is restored after the run."""

    name: str = "tf32"
    """The name of the precision."""


@dataclass
class BF16Conf:
    """`precision=bf16`: forward and evaluation under autocast to bfloat16.

    It has the range of fp32 with 7 bits of mantissa. The first choice wherever the hardware has it: nothing to tune,
    and no steps skipped."""

    name: str = "bf16"
    """The name of the precision."""


@dataclass
class FP16Conf:
    """`precision=fp16`: autocast to float16, for GPUs without bfloat16. The loss is scaled to keep gradients in range.

    Steps whose gradients overflow are skipped, counted and logged. Costs one wait for the device per optimizer
    step, since schedules, averages and counters move only if the step was taken. CPUs compute it too, most of them
    far slower than fp32."""

    name: str = "fp16"
    """The name of the precision."""
    init_scale: float = 65536.0
    """What the loss is multiplied by at first, `min_scale` .. 1e38. torch's own: rather too large, since a few
    skipped steps bring it down, while one too small loses gradients unseen for thousands of steps."""
    growth_factor: float = 2.0
    """What the scale is multiplied by after `growth_interval` steps without an overflow, above 1. torch's own; a power
    of two changes no bit of a mantissa."""
    backoff_factor: float = 0.5
    """What the scale is multiplied by after an overflow, above 0, at most 0.99. torch's own; undoes one growth."""
    growth_interval: int = 2000
    """Optimizer steps without an overflow before the scale grows, 1 or more. torch's own: at most one step in 2000 is
    lost to finding the limit."""
    min_scale: float = 1e-4
    """The scale below which the run ends with an error, 1e-30 .. `init_scale`. From 65536 that is 30 overflows in a
    row: then it is the loss that is not finite, and all further steps would be skipped without a word."""


def register(store: ConfigStore) -> None:
    """Store the options of the group `precision`."""
    for schema in (FP32Conf, TF32Conf, BF16Conf, FP16Conf):
        store.store(group="precision", name=schema.name, package="precision", node=schema)
