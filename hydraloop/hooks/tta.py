"""TestTimeAugmentationHook: tests on the mean over several views of each image."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook, Priority
from hydraloop.errors import UserError
from hydraloop.schemas.option_checks import check_at_least, check_choice, names_or_callables

log = logging.getLogger(__name__)

View = Callable[[Tensor], Tensor]
"""Transforms a batch of inputs, without changing the meaning of the samples."""
Merge = Callable[[Tensor], Tensor]
"""Merges the outputs of all views `[V, N, ...]` into `[N, ...]`."""


def shifted(down: int, right: int) -> View:
    """Move images by pixels; the edge is repeated to fill the gap."""

    def shift(images: Tensor) -> Tensor:
        for dimension, pixels in ((-2, down), (-1, right)):
            if pixels:
                size = images.shape[dimension]
                source = torch.arange(size, device=images.device).sub(pixels).clamp(0, size - 1)
                images = images.index_select(dimension, source)
        return images

    return shift


def named_views(shift: int) -> dict[str, tuple[View, ...]]:
    """Return the views that each name means, for images `[N, ..., H, W]`.

    Args:
        shift: pixels by which the four views of `shift` are moved.
    """
    return {
        "identity": (lambda images: images,),
        "hflip": (lambda images: images.flip(-1),),
        "vflip": (lambda images: images.flip(-2),),
        "rot90": (lambda images: images.rot90(1, (-2, -1)),),
        "rot180": (lambda images: images.rot90(2, (-2, -1)),),
        "rot270": (lambda images: images.rot90(3, (-2, -1)),),
        "shift": (shifted(-shift, 0), shifted(shift, 0), shifted(0, -shift), shifted(0, shift)),
    }


def mean_output(outputs: Tensor) -> Tensor:
    """Average over the views."""
    return outputs.mean(0)


def mean_probability(logits: Tensor) -> Tensor:
    """Average the views' class probabilities and return the logarithm: `[V, N, C, ...]` to `[N, C, ...]`.

    Its softmax is the mean, so that cross-entropy and metrics of logits are right.
    """
    return logits.log_softmax(2).logsumexp(0) - math.log(len(logits))


_MERGES: dict[str, Merge] = {"probabilities": mean_probability, "outputs": mean_output}
_TRANSFORMS = ["identity", "hflip"]


class TestTimeAugmentationHook(Hook):
    """Tests on the mean over several views of each image; training and validation are unchanged.

    During a test epoch, the task's model is replaced by one that calls the original model on each view and merges the
    outputs. Loss, metrics and predictions of the test use the merged output. The original model is always restored;
    weights are not changed. With `ema`, the average gets the views, regardless of the hooks' order. With several ranks,
    each views its own samples. Compiled and sharded models work.

    Names: `identity` (the image itself), `hflip`, `vflip`, `rot90`, `rot180`, `rot270` (anticlockwise), and `shift`:
    four views, moved up, down, left and right by `shift` pixels. They are for images `[N, C, H, W]`. Any other callable
    that takes a batch of inputs works too, as a mapping with `_target_` in the config.

    Use views only if they do not change the meaning of an image. The default, the mirror image, suits most photographs.
    It makes the test worse for letters and signs; use [identity,shift] for these.

    Priority HIGHEST: all other hooks see the model that is tested. Cost: the time of a test is multiplied by the number
    of views; a copy of the inputs. No host sync, no more memory for the model. No state. Options:
    `TestTimeAugmentationHookConf`. From MMEngine's PrepareTTAHook, and MMPretrain's AverageClsScoreTTA for the
    probabilities.

    Raises:
        UserError: an unknown name, no transform, a shift below 1; or, in the test, the inputs are not images, or the
            model's outputs cannot be merged.
    """

    __test__ = False  # pytest would collect a class whose name begins with Test
    priority = Priority.HIGHEST
    changes_evaluation = True

    def __init__(self, *, transforms: Sequence[str | View] = _TRANSFORMS, merge: str = "auto", shift: int = 1) -> None:
        check_at_least(1, shift=shift)
        check_choice(("auto", *_MERGES), merge=merge)
        known = named_views(shift)
        self._named = names_or_callables("transforms", transforms, tuple(known), "transform")
        if not self._named:
            raise UserError("there is no transform", key="transforms", remedy="Name one or more: [identity,hflip].")
        self._views = [view for one in self._named for view in (known[one] if isinstance(one, str) else (one,))]
        self._turns = any(isinstance(one, str) and one != "identity" for one in self._named)
        self._merge = merge

    def before_test_epoch(self, engine: Engine) -> None:
        engine.evaluator.during(self._augmented(engine))

    @contextmanager
    def _augmented(self, engine: Engine) -> Iterator[None]:
        names = ", ".join(
            one if isinstance(one, str) else getattr(one, "__name__", type(one).__name__) for one in self._named
        )
        merge, count = self._merge_of(engine.task), len(self._views)
        if engine.distributed.is_main:
            log.info("%s: the test takes the mean of the %s of %d views (%s)", self.key, merge, count, names)
        model = engine.task.model
        engine.task.model = Views(model, self._views, _MERGES[merge], turns=self._turns, key=self.key)
        try:
            yield
        finally:
            engine.task.model = model

    def _merge_of(self, task: Any) -> str:
        """Return which outputs are merged; `auto` means probabilities if the loss shows that outputs are logits."""
        if self._merge != "auto":
            return self._merge
        loss = getattr(task, "loss", None)
        functions = (nn.functional.cross_entropy, nn.functional.nll_loss)
        of_classes = isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) or loss in functions
        return "probabilities" if of_classes else "outputs"


class Views(nn.Module):
    """Calls a model with several views of each batch, one after the other, and merges the outputs.

    Each view is made from a copy of the inputs, so that changes in place do not affect the other views. Other
    attributes (`num_classes`, methods) are those of the model.

    Args:
        model: called with each view of the first argument; further arguments are passed unchanged.
        views: at least one.
        merge: applied to the stacked outputs.
        turns: whether a view moves pixels, so that inputs must be images and outputs must not be maps.
        key: the hook's key in the config, for errors.
    """

    def __init__(self, model: nn.Module, views: Sequence[View], merge: Merge, *, turns: bool, key: str) -> None:
        super().__init__()
        self.model = model
        self._views = tuple(views)
        self._merge = merge
        self._turns = turns
        self._key = key

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    def forward(self, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return the merged output, in float32 or wider. No host sync.

        Raises:
            UserError: the inputs cannot be viewed, or the outputs cannot be merged.
        """
        if self._turns and (not isinstance(inputs, Tensor) or inputs.ndim < 4):
            raise UserError(
                f"these transforms are for images [N, C, H, W], but the input of the test is {_shown(inputs)}",
                key=f"{self._key}.transforms",
                remedy="Leave the hook out, or use your own transforms: [{_target_: my_project.views.Jitter}].",
            )
        outputs = torch.stack([self.model(view(_copied(inputs)), *args, **kwargs) for view in self._views])
        if self._turns and outputs[0].ndim > 2:
            raise UserError(
                f"the model returned {_shown(outputs[0])}, a map, in which each view moves the image",
                key=f"{self._key}.transforms",
                remedy="Leave the hook out: these views are for one output per sample, [N] or [N, C].",
            )
        return self._merge(outputs.to(torch.promote_types(outputs.dtype, torch.float32)))


def _copied(inputs: Any) -> Any:
    return inputs.clone() if isinstance(inputs, Tensor) else copy.deepcopy(inputs)


def _shown(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
