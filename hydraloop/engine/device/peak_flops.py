"""The peak performance of GPUs, for model FLOP utilisation (MFU)."""

from __future__ import annotations

import torch

_DENSE_BF16: dict[str, float] = {
    "B200": 2250.0,
    "H200": 989.0,
    "H200 NVL": 835.0,
    "GH200 480GB": 989.0,
    "H100 80GB HBM3": 989.0,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "A100-SXM4-40GB": 312.0,
    "A100-SXM4-80GB": 312.0,
    "A100-PCIE-40GB": 312.0,
    "A100 80GB PCIe": 312.0,
    "A40": 149.7,
    "A30": 165.0,
    "A10": 125.0,
    "A10G": 70.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "RTX A6000": 154.8,
    "RTX A4000": 76.7,
    "RTX 6000 Ada Generation": 364.2,
    "GeForce RTX 4090": 165.2,
    "GeForce RTX 3090": 71.0,
    "AMD Instinct MI300X": 1307.4,
    "AMD Instinct MI250X": 191.5,
}
"""10^12 dense operations per second in bf16 or fp16 of one device as torch counts them, by the device's full name
without the `NVIDIA` of newer drivers. A device with a longer name (a part of a GPU, a laptop's) has another peak.
Source: the vendors' data sheets."""

_SHARE = {"bf16": 1.0, "fp16": 1.0, "tf32": 0.5}
"""By precision, the share of that peak: tensor cores are half as fast in tf32. fp32 has no fixed share."""
_WITHOUT_TF32 = frozenset({"AMD Instinct MI250X"})


def peak_tflops(device: torch.device, precision: str) -> float | None:
    """Return 10^12 floating-point operations per second; None if the device or the precision is not in the tables."""
    if device.type != "cuda" or precision not in _SHARE:
        return None
    name = torch.cuda.get_device_name(device).removeprefix("NVIDIA ")
    if name not in _DENSE_BF16 or (precision == "tf32" and name in _WITHOUT_TF32):
        return None
    return _DENSE_BF16[name] * _SHARE[precision]
