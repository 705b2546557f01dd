"""What devices can do at most, for model FLOP utilisation."""

from __future__ import annotations

import torch

_DENSE_BF16: dict[str, float] = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
    "A40": 149.7,
    "A10G": 70.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L4": 121.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
    "MI300X": 1307.4,
    "MI250X": 191.5,
}
"""By a part of the device's name, the first that occurs: 10^12 operations a second in bf16 or fp16, not sparse, of
one device as torch counts them. Source: the vendors' data sheets."""

_SHARE = {"bf16": 1.0, "fp16": 1.0, "tf32": 0.5}
"""Of that, by precision; tensor cores do half as much in tf32. What fp32 reaches is not in proportion."""


def peak_tflops(device: torch.device, precision: str) -> float | None:
    """10^12 floating-point operations a second; None where the device or the precision is not in the table."""
    if device.type != "cuda" or precision not in _SHARE:
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak * _SHARE[precision] for part, peak in _DENSE_BF16.items() if part in name), None)
