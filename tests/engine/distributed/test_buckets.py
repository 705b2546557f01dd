"""Many tensors in one collective: the same values on all ranks, whatever their types, strides and sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hydraloop.engine.distributed import buckets
from hydraloop.engine.distributed.process_group import ProcessGroup
from tests.ranks import on_ranks


def all_kinds(seed: int) -> nn.Module:
    """Parameters and buffers of several types, with strides of their own, empty ones and scalars."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), nn.BatchNorm2d(4))
    module.register_parameter("short", nn.Parameter(torch.randn(5).to(torch.bfloat16)))
    module.register_buffer("flags", torch.rand(6) > 0.5)
    module.register_buffer("empty", torch.empty(0, 3))
    module.register_buffer("transposed", torch.randn(3, 5).T)
    for buffer in module.buffers():
        if buffer.is_floating_point():
            buffer += seed
    return module


def made_equal(distributed: ProcessGroup, limit: int) -> list[Any]:
    """The number of broadcasts of a start and of an evaluation, then all values."""
    buckets.LIMIT, before = limit, buckets.LIMIT
    try:
        module = all_kinds(distributed.rank)
        strides = [tensor.stride() for tensor in module.parameters()]
        counts = [_so_far()]
        distributed.broadcast_weights(module)
        counts.append(_so_far())
        distributed.before_evaluation(module)
        counts.append(_so_far())
        assert strides == [tensor.stride() for tensor in module.parameters()]
    finally:
        buckets.LIMIT = before
    return [counts[1] - counts[0], counts[2] - counts[1], values_of(module)]


def _so_far() -> int:
    """Return torch's number of the next collective of the group."""
    group: Any = torch.distributed.group.WORLD
    return int(group._get_sequence_number_for_group())


def values_of(module: nn.Module) -> dict[str, Any]:
    tensors: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: value.tolist() for name, value in tensors.items()}


@pytest.mark.parametrize(("limit", "expected"), [(250 * 2**20, (4, 3)), (100, (6, 3))])
def test_a_start_and_an_evaluation_need_few_broadcasts(limit: int, expected: tuple[int, int]) -> None:
    for start, evaluation, values in on_ranks(2, made_equal, limit):
        assert values == values_of(all_kinds(0))
        assert (start, evaluation) == expected, "one for each type, and for each that is larger than a bucket"
