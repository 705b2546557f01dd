"""Moving a batch: its structure, the layout of its tensors, and what is not moved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hydraloop.engine.batch_transfer import mover, tensors_of

CPU = torch.device("cpu")
META = torch.device("meta")
"""A device that every torch has, whose tensors have no memory. Batches can be moved to it."""


def test_on_the_cpu_a_batch_is_left_as_it_is() -> None:
    given = {"image": torch.zeros(2), "other": (torch.ones(2), None)}
    assert mover(CPU)(given) is given


def test_a_tensor_alone_is_a_batch() -> None:
    tensor = torch.zeros(2)
    assert mover(META)(tensor).device == META
    assert list(tensors_of(tensor)) == [tensor]
    assert list(tensors_of("no tensor")) == []


@pytest.mark.parametrize("device", [CPU, META])
def test_images_and_volumes_are_laid_out_channels_last(device: torch.device) -> None:
    images, volumes = torch.rand(2, 3, 4, 5), torch.rand(2, 3, 4, 5, 6)
    moved = mover(device, channels_last=True)({"images": images, "volumes": volumes})
    assert moved["images"].is_contiguous(memory_format=torch.channels_last)
    assert moved["volumes"].is_contiguous(memory_format=torch.channels_last_3d)
    assert (moved["images"].shape, moved["volumes"].shape) == (images.shape, volumes.shape)
    assert images.is_contiguous(), "the batch of the loader stays as it is"
    if device == CPU:
        assert torch.equal(moved["images"], images)


@pytest.mark.parametrize("other", [torch.zeros(2, 3, 4), torch.zeros(2, 3, 4, 5, dtype=torch.int64), torch.zeros(2)])
def test_channels_last_is_for_floating_images(other: Tensor) -> None:
    assert mover(CPU, channels_last=True)(other) is other


class CopiesTo(TorchFunctionMode):
    """Stands for an accelerator that this machine lacks: notes `non_blocking` of each copy to it, and does not copy."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = torch.device(device)
        self.non_blocking: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.to or args[1] != self._device:
            return func(*args, **(kwargs or {}))
        self.non_blocking.append(bool((kwargs or {}).get("non_blocking")))
        return args[0]


@pytest.mark.parametrize(("device", "expected"), [("mps", False), ("cuda:0", True)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_copies_to_mps_block_since_it_may_read_freed_memory(device: str, expected: bool, channels_last: bool) -> None:
    """Tests the decision only: the copy itself needs a Mac."""
    with CopiesTo(device) as copies:
        mover(torch.device(device), channels_last)({"images": torch.rand(2, 3, 4, 5), "labels": torch.ones(2)})
    assert copies.non_blocking == [expected, expected]
