"""TestTimeAugmentationHook: the test looks at several views of each image and takes their mean."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hydraloop.engine.hook import Hook, Priority
from hydraloop.errors import UserError, suggestion
from hydraloop.hooks.shared.trial_step import can_try, some_batch, try_test
from hydraloop.hooks.shared.views import Merge, View, Views, check_images, mean_output, mean_probability, named_views
from hydraloop.run.result import describe

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine

log = logging.getLogger(__name__)

_MERGES: dict[str, Merge] = {"probabilities": mean_probability, "outputs": mean_output}
_TRANSFORMS = ["identity", "hflip"]


class TestTimeAugmentationHook(Hook):
    """Tests on the mean over several views of each image; training and validation do not notice.

    For the time of a test epoch the task's model is one that calls the true model on each view and merges the outputs.
    Loss, metrics and predictions of the test are those of the merged output. It is taken out again whatever happens; no
    weight is touched. With `ema` the views are seen by the average, whichever hook comes first. With several ranks each
    views its own samples. Compiled models and models in shards work as they are.

    Names: `identity` (the image itself), `hflip`, `vflip`, `rot90`, `rot180`, `rot270` (anticlockwise), and `shift`,
    four views, moved up, down, left and right by `shift` pixels. They are for images `[N, C, H, W]`. Anything else
    called with a batch of inputs works too, as a mapping with `_target_` in the config.

    Views only help where they mean the same as the image. The default, the mirror image, fits most photographs; digits,
    letters and signs are others in it, and the test becomes worse: for these, [identity,shift].

    Mount points: before_train, before_test_epoch. Priority HIGHEST: every other hook finds the model that will be
    tested. Cost: a test takes as many times as long as there are views, and a copy of the inputs; no host sync, no more
    memory for the model; before training, a step of the test on two samples. No state. From MMEngine's PrepareTTAHook,
    and MMPretrain's AverageClsScoreTTA for the probabilities.

    Args:
        transforms: names and callables, at least one; each view counts the same.
        merge: `probabilities`: the mean of the classes' probabilities, handed on as its logarithm, whose softmax it
            is; `outputs`: the mean of the outputs; `auto`: probabilities where the task's loss is torch's cross-entropy
            or NLL, which says that the outputs are logits of classes, else outputs.
        shift: pixels of the transform `shift`, at least 1 and less than an image's height and width.

    Raises:
        UserError: an unknown name, no transform, a shift below 1; or the test's inputs are no images, or too small for
            the shift, or the model's outputs cannot be merged. That is tried out before the first iteration, where two
            samples can be had at no risk (no worker processes) and the model is neither in shards nor compiled; else it
            is seen at the first test batch.
    """

    __test__ = False  # what pytest looks for in a class called Test…
    priority = Priority.HIGHEST

    def __init__(self, *, transforms: Sequence[str | View] = _TRANSFORMS, merge: str = "auto", shift: int = 1) -> None:
        if shift < 1:
            raise UserError(f"{shift} is below 1", key="shift", remedy="Use 1 or more pixels.")
        if merge not in ("auto", *_MERGES):
            raise UserError(f"there is no merge {merge!r}", key="merge", remedy=suggestion(merge, ("auto", *_MERGES)))
        self._named = _checked(transforms)
        known = named_views(shift)
        self._views = [view for one in self._named for view in (known[one] if isinstance(one, str) else (one,))]
        self._turns = any(isinstance(one, str) and one != "identity" for one in self._named)
        self._merge = merge
        self._shift = shift if "shift" in self._named else 0

    def before_train(self, engine: Engine) -> None:
        """Try a step of the test; warn where there will be none.

        Raises:
            UserError: it fails for the views.
        """
        if engine.loaders.test is None or not engine.settings.test:
            if engine.distributed.is_main:
                why = "there is no test data" if engine.loaders.test is None else "engine.test=false"
                log.warning("%s: nothing is tested (%s), so nothing will be augmented", self.key, why)
            return
        batch = some_batch(engine.loaders.test)
        if batch is None:
            return
        if can_try(engine):
            self._try(engine, batch)
        elif self._turns and isinstance(batch, Sequence) and batch and isinstance(batch[0], Tensor):
            check_images(batch[0], key=self.key, shift=self._shift)

    def before_test_epoch(self, engine: Engine) -> None:
        """Put the merging model in the place of the task's model for this test."""
        engine.during_evaluation(self._augmented(engine))

    @contextmanager
    def _augmented(self, engine: Engine) -> Iterator[None]:
        main = engine.distributed.is_main
        if main:
            names = ", ".join(
                one if isinstance(one, str) else getattr(one, "__name__", type(one).__name__) for one in self._named
            )
            merge = self._merge_of(engine.task)
            log.info("%s: the test takes the mean of the %s of %d views (%s)", self.key, merge, len(self._views), names)
        with self._in_place(engine) as views:
            yield
        if main and not views.called:
            log.warning(
                "%s: the task's evaluate does not call the forward of its model, so nothing was augmented", self.key
            )

    @contextmanager
    def _in_place(self, engine: Engine) -> Iterator[Views]:
        """The merging model in the place of the task's."""
        model, merge = engine.task.model, _MERGES[self._merge_of(engine.task)]
        engine.task.model = Views(model, self._views, merge, turns=self._turns, key=self.key, shift=self._shift)
        try:
            yield engine.task.model
        finally:
            engine.task.model = model

    def _merge_of(self, task: Any) -> str:
        if self._merge != "auto":
            return self._merge
        return "probabilities" if _of_classes(task) else "outputs"

    def _try(self, engine: Engine, batch: Any) -> None:
        try:
            with self._in_place(engine):
                try_test(engine, batch)
        except Exception as error:  # of the user's model, task or view: anything
            if isinstance(error, UserError) and str(error.key).startswith(self.key):
                raise
            try:
                try_test(engine, batch)
            except Exception:  # it fails without the views as well, which is not for this hook to tell
                return
            raise UserError(
                f"the test fails with these views, and does not without them: {describe(error)}",
                key=f"{self.key}.transforms",
                remedy="Use views of the size that the model takes: rot90 and rot270 exchange height and width.",
            ) from error


def _checked(transforms: Sequence[str | View]) -> list[str | View]:
    given: list[str | View] = [transforms] if isinstance(transforms, str) else list(transforms)
    names = list(named_views(1))
    if not given:
        raise UserError("there is no transform", key="transforms", remedy="Name one or more: [identity,hflip].")
    for one in given:
        if isinstance(one, str) and one not in names:
            raise UserError(f"there is no transform {one!r}", key="transforms", remedy=suggestion(one, names))
        if not callable(one) and not isinstance(one, str):
            raise UserError(
                f"{one!r} is no transform",
                key="transforms",
                remedy=f"Known: {', '.join(names)}. A mapping with `_target_` for one of your own works too.",
            )
    return given


def _of_classes(task: Any) -> bool:
    """Whether the loss says that the outputs are logits (or log-probabilities) of classes."""
    loss = getattr(task, "loss", None)
    functions = (nn.functional.cross_entropy, nn.functional.nll_loss)
    return isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) or loss in functions
