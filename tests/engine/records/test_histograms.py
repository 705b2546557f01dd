"""Histograms of tensors."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hydraloop.engine.records import BINS, histograms


def counted(tensor: Tensor) -> dict[str, Any]:
    return histograms({"it": tensor})["it"]


def test_the_entries_are_counted_in_bins_of_equal_width() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    found = counted(values.reshape(10, 100))
    assert (found["num"], found["nonfinite"]) == (1000, 0)
    assert (found["min"], found["max"]) == (values.min().item(), values.max().item())
    assert found["sum"] == pytest.approx(values.sum().item(), rel=1e-4)
    assert found["sum_squares"] == pytest.approx(values.square().sum().item(), rel=1e-4)
    expected = torch.histogram(values, BINS)
    assert found["bucket"] == expected.hist.int().tolist()
    assert found["bucket_limit"] == pytest.approx(expected.bin_edges[1:].tolist(), abs=1e-5)
    assert found["bucket_limit"][-1] == found["max"]
    json.dumps(found, allow_nan=False)


def test_what_is_not_finite_is_counted_apart() -> None:
    found = counted(torch.tensor([1.0, math.nan, 3.0, math.inf, -math.inf, 3.0]))
    assert (found["num"], found["nonfinite"], found["min"], found["max"]) == (3, 3, 1.0, 3.0)
    assert (found["sum"], found["sum_squares"]) == (7.0, 19.0)
    assert (found["bucket"][0], found["bucket"][-1], sum(found["bucket"])) == (1, 2, 3)
    none = counted(torch.full((4,), math.nan))
    assert (none["num"], none["nonfinite"], none["bucket"], none["min"], none["max"]) == (0, 4, [], 0.0, 0.0)
    json.dumps(none, allow_nan=False)


@pytest.mark.parametrize("values", [[0.0, 0.0, 0.0], [2.5, 2.5]])
def test_entries_that_are_all_the_same_are_in_one_bin(values: list[float]) -> None:
    found = counted(torch.tensor(values))
    assert sorted(found["bucket"]) == [*[0] * (BINS - 1), len(values)]
    assert found["min"] == found["max"] == values[0]


def test_a_range_beyond_float32_is_counted() -> None:
    found = counted(torch.tensor([-3e38, 3e38]))
    assert (found["bucket"][0], found["bucket"][-1], found["num"]) == (1, 1, 2)


def test_other_types_and_empty_ones() -> None:
    found = histograms({
        "half": torch.tensor([1, 2], dtype=torch.bfloat16), "whole": torch.tensor([1, 4]), "none": torch.empty(0)
    })  # fmt: skip
    assert {name: (facts["min"], facts["max"]) for name, facts in found.items()} == {"half": (1, 2), "whole": (1, 4)}
    assert histograms({}) == {}
