"""Histograms of many tensors with two host syncs: the contents of TensorBoard's HistogramProto."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

BINS = 64
"""Number of bins of equal width; TensorBoard draws 30."""
_PIECE = 1 << 24
"""Entries counted at once: float32, in which torch counts, is exact up to this number. Limits the size of copies."""
_FLOAT_MAX = torch.finfo(torch.float32).max


def histograms(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Count the entries of each tensor in bins between its smallest and its largest finite one.

    Two host syncs, regardless of the number of tensors. Sums are computed by torch in float32.

    Args:
        tensors: by name, real numbers of any shape on one device; empty ones are left out.

    Returns:
        For each name `{"min", "max", "num", "sum", "sum_squares", "bucket_limit", "bucket", "nonfinite"}`, plain
            numbers of its finite entries; `nonfinite` counts the others. Without finite entries there are no buckets.
    """
    pieces = [(name, piece) for name, tensor in tensors.items() for piece in _pieces(tensor)]
    if not pieces:
        return {}
    rows: list[list[float]] = torch.stack([_facts(piece) for _, piece in pieces]).tolist()
    found: dict[str, dict[str, Any]] = {}
    for (name, piece), row in zip(pieces, rows, strict=True):
        _add(found.setdefault(name, _nothing()), row, piece.numel())
    _count(pieces, found)
    return found


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    flat = tensor.detach().flatten()
    return (flat[start : start + _PIECE] for start in range(0, len(flat), _PIECE))


def _facts(piece: Tensor) -> Tensor:
    """Return minimum, maximum, sum, sum of squares of the finite entries, and the number of others; on the device."""
    values = piece.float()
    finite = values.isfinite()
    filled = values.where(finite, 0.0)
    least, greatest = values.where(finite, math.inf).min(), values.where(finite, -math.inf).max()
    return torch.stack([least, greatest, filled.sum(), filled.square().sum(), (~finite).sum().float()])


def _nothing() -> dict[str, Any]:
    numbers = {"min": math.inf, "max": -math.inf, "num": 0, "sum": 0.0, "sum_squares": 0.0}
    return {**numbers, "bucket_limit": [], "bucket": [], "nonfinite": 0}


def _add(facts: dict[str, Any], row: list[float], entries: int) -> None:
    least, greatest, total, squares, nonfinite = row
    facts.update(
        min=min(facts["min"], least),
        max=max(facts["max"], greatest),
        num=facts["num"] + entries - int(nonfinite),
        sum=facts["sum"] + total,
        sum_squares=facts["sum_squares"] + squares,
        nonfinite=facts["nonfinite"] + int(nonfinite),
    )


def _count(pieces: list[tuple[str, Tensor]], found: Mapping[str, dict[str, Any]]) -> None:
    """Fill the buckets."""
    counted = []
    for name, piece in pieces:
        facts = found[name]
        width = facts["max"] - facts["min"]
        if 0 < width <= _FLOAT_MAX:
            counted.append((name, piece))
            facts["bucket"] = [0] * BINS
            facts["bucket_limit"] = [facts["min"] + width * (n + 1) / BINS for n in range(BINS - 1)] + [facts["max"]]
        elif facts["num"]:  # all equal, or the width overflows float32
            facts.update(bucket=[facts["num"]], bucket_limit=[facts["max"]])
        else:
            facts.update(min=0.0, max=0.0)
    if not counted:
        return
    with _in_any_order():
        bins = [piece.float().histc(BINS, found[name]["min"], found[name]["max"]) for name, piece in counted]
    rows: list[list[float]] = torch.stack(bins).tolist()
    for (name, _), row in zip(counted, rows, strict=True):
        found[name]["bucket"] = [before + int(more) for before, more in zip(found[name]["bucket"], row, strict=True)]


@contextmanager
def _in_any_order() -> Iterator[None]:
    """Allow a nondeterministic operation: the counts do not depend on its order."""
    if not torch.are_deterministic_algorithms_enabled():
        yield  # setting the mode would import torch's compiler, which takes a second
        return
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=warns)
