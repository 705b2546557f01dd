"""Views of an image batch, and a model that merges what it says of them: the machinery of the `tta` hook."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hydraloop.errors import UserError

View = Callable[[Tensor], Tensor]
"""From a batch of inputs to the same samples, seen differently."""
Merge = Callable[[Tensor], Tensor]
"""From the outputs of all views `[V, N, ...]` to one `[N, ...]`."""


def identity(images: Tensor) -> Tensor:
    """The images as they are."""
    return images


def hflip(images: Tensor) -> Tensor:
    """Left and right exchanged."""
    return images.flip(-1)


def vflip(images: Tensor) -> Tensor:
    """Top and bottom exchanged."""
    return images.flip(-2)


def turned(quarters: int) -> View:
    """Turned anticlockwise by a number of quarters; with an odd one, height and width are exchanged."""
    return lambda images: torch.rot90(images, quarters, (-2, -1))


def shifted(down: int, right: int) -> View:
    """Moved by pixels; what comes in at an edge repeats that edge, so that a background of any value goes on."""

    def shift(images: Tensor) -> Tensor:
        for dimension, pixels in ((-2, down), (-1, right)):
            if pixels:
                size = images.shape[dimension]
                source = torch.arange(size, device=images.device).sub(pixels).clamp(0, size - 1)
                images = images.index_select(dimension, source)
        return images

    return shift


def named_views(shift: int) -> dict[str, tuple[View, ...]]:
    """The views that each name stands for; of images `[N, ..., H, W]`.

    Args:
        shift: pixels by which the four views of `shift` are moved.
    """
    return {
        "identity": (identity,),
        "hflip": (hflip,),
        "vflip": (vflip,),
        "rot90": (turned(1),),
        "rot180": (turned(2),),
        "rot270": (turned(3),),
        "shift": (shifted(-shift, 0), shifted(shift, 0), shifted(0, -shift), shifted(0, shift)),
    }


def mean_output(outputs: Tensor) -> Tensor:
    """The mean over the views."""
    return outputs.mean(0)


def mean_probability(logits: Tensor) -> Tensor:
    """The mean of the views' class probabilities, as its logarithm: `[V, N, C, ...]` to `[N, C, ...]`.

    A softmax of it gives the mean itself, so that a cross-entropy, and whatever else takes logits, is right.
    """
    return logits.log_softmax(2).logsumexp(0) - math.log(len(logits))


class Views(nn.Module):
    """A model that looks at each batch several times, one view after the other, and merges what it says.

    Each view is made of a copy of the inputs, so that a model or a view that changes them in place spoils no other.
    Needs the memory of one batch more and the time of as many as there are views. What is not the forward pass
    (`num_classes`, other methods) is the model's own.

    Args:
        model: called with each view of the first argument, and the further ones as they are.
        views: at least one.
        merge: of the outputs.
        turns: whether a view moves pixels about, so that inputs have to be images, and outputs must not be.
        key: the hook's, for errors.
        shift: pixels by which views are moved; 0 where none is.
    """

    def __init__(
        self, model: nn.Module, views: Sequence[View], merge: Merge, *, turns: bool, key: str, shift: int = 0
    ) -> None:
        super().__init__()
        self.model = model
        self.called = False
        """Whether the forward pass has been asked for."""
        self._views, self._merge, self._turns, self._key, self._shift = tuple(views), merge, turns, key, shift

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    def forward(self, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The merged output, in float32 or wider. No host sync.

        Raises:
            UserError: inputs or outputs are not what can be viewed or merged.
        """
        self.called = True
        if self._turns:
            check_images(inputs, key=self._key, shift=self._shift)
        outputs = [self.model(view(_copied(inputs)), *args, **kwargs) for view in self._views]
        self._check(outputs)
        wide = torch.promote_types(outputs[0].dtype, torch.float32)
        return self._merge(torch.stack(outputs).to(wide))

    def _check(self, outputs: list[Any]) -> None:
        first = outputs[0]
        if not isinstance(first, Tensor) or not first.is_floating_point():
            raise UserError(
                f"the model returned {_shown(first)}; what can be merged is one tensor of floats [N, ...]",
                key=self._key,
                remedy="Leave the hook out, or let the model return its logits.",
            )
        if any(output.shape != first.shape for output in outputs):
            shapes = ", ".join(str(list(output.shape)) for output in outputs)
            raise UserError(
                f"the views' outputs differ in shape: {shapes}",
                key=f"{self._key}.transforms",
                remedy="Use views of one size: rot90 and rot270 exchange height and width.",
            )
        if self._turns and first.ndim > 2:
            raise UserError(
                f"the model returned {_shown(first)}, in the place of which each view has another part of the image",
                key=f"{self._key}.transforms",
                remedy="These are for one output a sample, [N] or [N, C]; for maps, leave the hook out.",
            )
        if self._merge is mean_probability and (first.ndim < 2 or first.shape[1] < 2):
            raise UserError(
                f"the model returned {_shown(first)}, which are no logits [N, C] of two classes or more",
                key=f"{self._key}.merge",
                remedy="Use merge=outputs, the plain mean.",
            )


def check_images(inputs: Any, *, key: str, shift: int = 0) -> None:
    """Refuse inputs in which there is nothing to flip, or nothing left of an image that is moved by `shift` pixels.

    Raises:
        UserError: they are no batch of images, or of images that small.
    """
    if not isinstance(inputs, Tensor) or inputs.ndim < 4:
        raise UserError(
            f"these transforms are for images [N, C, H, W], and the test has inputs of {_shown(inputs)}",
            key=f"{key}.transforms",
            remedy="Leave the hook out, or name transforms of your own: [{_target_: my_project.views.Jitter}].",
        )
    height, width = inputs.shape[-2:]
    if shift >= min(height, width):
        raise UserError(
            f"{shift} pixels move images of {height}x{width} out of sight",
            key=f"{key}.shift",
            remedy=f"Use less than {min(height, width)}; 1 is usual.",
        )


def _copied(inputs: Any) -> Any:
    return inputs.clone() if isinstance(inputs, Tensor) else copy.deepcopy(inputs)


def _shown(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
