"""SyncRandomSizeHook: trains at changing input sizes, the same on every rank."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from torch.utils.hooks import RemovableHandle

from hydraloop.engine.batch_transfer import tensors_of
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.errors import UserError
from hydraloop.schemas.option_checks import check_above, check_at_least


class SyncRandomSizeHook(Hook):
    """Multi-scale training: draws a new input size every `interval` iterations from (seed, iteration).

    All ranks use the same size without communication, and a resumed run draws the same sizes. Heights are multiples of
    `divisor` within `min_ratio` .. `max_ratio` of the batch's height, with equal probability; the width keeps the
    proportion. Validation and test use the data's size.

    While the model trains, a forward pre-hook of torch interpolates (bilinear) its first input, floats `[N, C, H, W]`,
    on the device. Targets are unchanged. A task whose targets must change too (boxes, masks) has `set_input_size(size:
    tuple[int, int])`: it is called with (height, width) before the first iteration of each size, instead of the
    interpolation, and the task applies the size in `forward`, not in `evaluate`.

    A model for one input size only (`Flatten` and `Linear`) fails at another size.

    Priority NORMAL, MMDetection's. No host sync; the interpolation costs a pass over the images, and the largest size
    determines the memory. With `engine.compile`, torch compiles the model twice: for the first size, then for any. No
    state. Options: `SyncRandomSizeHookConf`. From YOLOX (Z. Ge et al., 2021) and MMDetection's SyncRandomSizeHook,
    which changes sizes by epoch, and its successor BatchSyncRandomResize.

    Raises:
        UserError: an option is out of range; in the first iteration, the input is not an image, or the range contains
            no multiple of `divisor`.
    """

    def __init__(self, *, interval: int = 10, min_ratio: float = 0.7, max_ratio: float = 1.3, divisor: int = 1) -> None:
        check_at_least(1, interval=interval, divisor=divisor)
        check_above(0, min_ratio=min_ratio)
        if not min_ratio <= max_ratio < math.inf:
            raise UserError(
                f"{max_ratio} is below min_ratio={min_ratio}, or infinite",
                key="max_ratio",
                remedy="Use 1.3 for 130 % of the height.",
            )
        self.min_ratio, self.max_ratio, self.divisor = min_ratio, max_ratio, divisor
        self.interval = interval
        self._drawn = 0.0
        self._tell: Callable[[tuple[int, int]], object] | None = None
        self._told = False
        self._on_model: RemovableHandle | None = None

    def at_position(self, engine: Engine) -> None:
        """Draw the size of this iteration, which is that of the last multiple of `interval`."""
        drawn_at = engine.progress.iteration // self.interval * self.interval
        # Random hashes a string seed in the same way on every machine, and random() is the same in every Python.
        self._drawn = random.Random(f"size {engine.run.seed} {drawn_at}").random()
        self._told = False

    def before_train(self, engine: Engine) -> None:
        """Add the pre-hook to the model, unless the task resizes."""
        self._tell = getattr(engine.task, "set_input_size", None)
        if self._tell is None:
            resize: Callable[..., Any] = self._resize
            if "torch._dynamo" in sys.modules:  # imported by compiled models only; takes 1.2 s
                resize = torch.compiler.disable(resize)  # type: ignore[no-untyped-call]  # else compiled for each size
            self._on_model = engine.model.register_forward_pre_hook(resize)

    def before_train_iter(self, engine: Engine, batch_idx: int, batch: Any) -> None:
        """Draw a new size every `interval` iterations; pass it to a task that has `set_input_size`."""
        if engine.progress.iteration % self.interval == 0:
            self.at_position(engine)
        if self._tell is not None and not self._told:
            images = next((tensor for tensor in tensors_of(batch) if _is_image(tensor)), None)
            if images is None:
                raise self._no_image("the batch has no such tensor")
            self._tell(self._size_of(images))
            self._told = True

    def after_train(self, engine: Engine) -> None:
        if self._on_model is not None:
            self._on_model.remove()

    def _resize(self, model: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not model.training:
            return None
        images = inputs[0] if inputs else None
        if not _is_image(images):
            got = f"a tensor {list(images.shape)}" if isinstance(images, Tensor) else f"a {type(images).__name__}"
            raise self._no_image(f"the model's first input is {got}")
        size = self._size_of(images)
        if size == tuple(images.shape[2:]):
            return None
        return (interpolate(images, size, mode="bilinear", align_corners=False), *inputs[1:])

    def _size_of(self, images: Tensor) -> tuple[int, int]:
        """Return the (height, width) that replace those of the images."""
        height, width = images.shape[2:]
        high = max(math.floor(self.max_ratio * height / self.divisor + 1e-6), 1)  # 1.1 * 100 is a little above 110
        low = min(max(math.ceil(self.min_ratio * height / self.divisor - 1e-6), 1), high)
        new = (low + int(self._drawn * (high - low + 1))) * self.divisor
        return new, max(round(width * new / height / self.divisor), 1) * self.divisor

    def _no_image(self, problem: str) -> UserError:
        return UserError(
            f"this hook resizes images of floats [N, C, H, W], but {problem}",
            key=self.key,
            remedy="Leave the hook out, or add set_input_size(size) to the task.",
        )


def _is_image(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.ndim == 4 and value.is_floating_point()
