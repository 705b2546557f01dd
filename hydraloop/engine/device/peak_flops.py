"""The peak performance of GPUs, for model FLOP utilisation (MFU)."""

from __future__ import annotations

import functools
import logging
import re

import torch

log = logging.getLogger(__name__)

_DENSE_BF16: dict[str, float] = {
    "GB300": 2500.0,
    "B300 SXM6 AC": 2250.0,
    "GB200": 2500.0,
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
    "RTX PRO 6000 Blackwell Workstation Edition": 503.8,
    "RTX PRO 6000 Blackwell Max-Q Workstation Edition": 438.9,
    "GeForce RTX 5090": 209.5,
    "GeForce RTX 5080": 112.6,
    "GeForce RTX 5070 Ti": 87.9,
    "GeForce RTX 5070": 61.7,
    "GeForce RTX 4090": 165.2,
    "GeForce RTX 3090": 71.0,
    "AMD Instinct MI355X": 2516.6,
    "AMD Instinct MI355 OAM": 2516.6,
    "AMD Instinct MI350X": 2306.9,
    "AMD Instinct MI350 OAM": 2306.9,
    "AMD Instinct MI325X": 1307.4,
    "AMD Instinct MI300X": 1307.4,
    "AMD Instinct MI250X": 191.5,
}
"""10^12 dense operations per second in bf16 or fp16 of one device as torch counts them, by the device's full name
without the `NVIDIA` of newer drivers. A device with a longer name (a part of a GPU, a laptop's) has another peak.
Source: the vendors' data sheets, for GeForce the peak that accumulates in fp32."""

_SHARE = {"bf16": 1.0, "fp16": 1.0, "tf32": 0.5}
"""By precision, the share of that peak: tensor cores are half as fast in tf32. fp32 has no fixed share."""
_WITHOUT_TF32 = re.compile(r"AMD Instinct MI(250|350|355)")


def peak_tflops(device: torch.device, precision: str) -> float | None:
    """Return 10^12 floating-point operations per second; None if the device or the precision is not in the tables.

    A line in the log says once that a GPU is not in the table.
    """
    if device.type != "cuda" or precision not in _SHARE:
        return None
    name = torch.cuda.get_device_name(device).removeprefix("NVIDIA ")
    if name not in _DENSE_BF16:
        _tell(name)
        return None
    if precision == "tf32" and _WITHOUT_TF32.match(name):
        return None
    return _DENSE_BF16[name] * _SHARE[precision]


@functools.cache
def _tell(name: str) -> None:
    log.info(
        "the records have no mfu, because the peak performance of %s is not known; set engine.peak_tflops=…, the 10^12 "
        "dense operations per second in its data sheet",
        name,
    )
