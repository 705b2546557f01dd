"""The table of what GPUs can do."""

from __future__ import annotations

import pytest
import torch

from hydraloop.engine.peak import peak_tflops


@pytest.mark.parametrize(
    ("name", "precision", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.0),
        ("NVIDIA H100 PCIe", "bf16", 756.0),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156.0),
        ("NVIDIA A10G", "fp16", 70.0),
        ("NVIDIA A10", "fp16", 125.0),
        ("NVIDIA L40S", "bf16", 362.0),
        ("NVIDIA L4", "bf16", 121.0),
        ("NVIDIA H100 80GB HBM3", "fp32", None),
        ("Some GPU", "bf16", None),
    ],
)
def test_peak(name: str, precision: str, expected: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)  # no machine has all of these
    assert peak_tflops(torch.device("cuda", 0), precision) == expected


def test_a_cpu_has_none() -> None:
    assert peak_tflops(torch.device("cpu"), "bf16") is None
