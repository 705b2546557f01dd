"""The table of peak performance of GPUs."""

from __future__ import annotations

import logging

import pytest
import torch

from hydraloop.engine.device.peak_flops import peak_tflops


@pytest.mark.parametrize(
    ("name", "precision", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.0),
        ("NVIDIA H100 80GB HBM3", "fp32", None),
        ("NVIDIA H100 PCIe", "fp16", 756.0),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156.0),
        ("A100-SXM4-40GB", "bf16", 312.0),  # the name in older drivers
        ("AMD Instinct MI250X", "bf16", 191.5),
        ("AMD Instinct MI250X", "tf32", None),
        ("NVIDIA B300 SXM6 AC", "bf16", 2250.0),
        ("NVIDIA GB200", "tf32", 1250.0),
        ("NVIDIA GeForce RTX 5090", "bf16", 209.5),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "fp16", 503.8),
        ("AMD Instinct MI355 OAM", "bf16", 2516.6),
        ("AMD Instinct MI355X", "tf32", None),
        ("AMD Instinct MI325X", "tf32", 653.7),
        # Names that contain another name.
        ("NVIDIA L40", "bf16", 181.0),
        ("NVIDIA RTX A4000", "bf16", 76.7),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "bf16", None),
        ("NVIDIA L400", "bf16", None),
        ("", "bf16", None),
    ],
)
def test_peak(name: str, precision: str, expected: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)  # no machine has all of these
    assert peak_tflops(torch.device("cuda", 0), precision) == expected


def test_an_unknown_gpu_is_told_once_with_the_option(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Rubin Test")
    with caplog.at_level(logging.INFO):
        for precision in ("bf16", "bf16", "fp32"):
            assert peak_tflops(torch.device("cuda", 0), precision) is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert "the peak performance of Rubin Test is not known; set engine.peak_tflops=" in line


def test_a_cpu_has_none() -> None:
    assert peak_tflops(torch.device("cpu"), "bf16") is None
