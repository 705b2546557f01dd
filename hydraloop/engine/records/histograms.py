"""Histograms of tensors: the contents of TensorBoard's HistogramProto."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

BINS = 64
"""Number of bins of equal width; TensorBoard draws 30."""


def histograms(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Count the entries of each tensor in bins between its smallest and its largest finite one.

    The entries are copied to the host and counted there in float64; one host sync for each tensor.

    Args:
        tensors: by name, real numbers of any shape; empty ones are left out.

    Returns:
        For each name `{"min", "max", "num", "sum", "sum_squares", "bucket_limit", "bucket", "nonfinite"}`, plain
            numbers of its finite entries; `nonfinite` counts the others. Without finite entries there are no buckets.
    """
    return {name: _counted(tensor) for name, tensor in tensors.items() if tensor.numel()}


def _counted(tensor: Tensor) -> dict[str, Any]:
    values = tensor.detach().flatten().cpu().double()
    finite = values[values.isfinite()]
    counts, edges = torch.histogram(finite, BINS) if len(finite) else (finite, finite)
    return {
        "min": finite.min().item() if len(finite) else 0.0,
        "max": finite.max().item() if len(finite) else 0.0,
        "num": len(finite),
        "sum": finite.sum().item(),
        "sum_squares": finite.square().sum().item(),
        "bucket_limit": edges[1:].tolist(),
        "bucket": counts.int().tolist(),
        "nonfinite": len(values) - len(finite),
    }
