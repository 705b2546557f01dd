"""TestTimeAugmentationHook: tests on the mean over several views of each image."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

from torch import nn

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook, Priority
from hydraloop.engine.loaders import sets_of
from hydraloop.errors import UserError
from hydraloop.hooks.shared.tta_views import (
    Merge,
    View,
    Views,
    mean_output,
    mean_probability,
    named_views,
)
from hydraloop.option_checks import check_at_least, check_choice, names_or_callables
from hydraloop.run_files.result import describe

log = logging.getLogger(__name__)

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
    It makes the test worse for digits, letters and signs; use [identity,shift] for these.

    Priority HIGHEST: all other hooks see the model that is tested. Cost: the time of a test is multiplied by the number
    of views; a copy of the inputs; a test step on one batch before training. No host sync, no more memory for the
    model. No state. Options: `TestTimeAugmentationHookConf`. From MMEngine's PrepareTTAHook, and MMPretrain's
    AverageClsScoreTTA for the probabilities.

    Raises:
        UserError: an unknown name, no transform, a shift below 1; or the test's inputs are not images, or the model's
            outputs cannot be merged. The latter is checked before the first iteration, with the first batch of the
            test; if a loader can be iterated only once, at its first batch.
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

    def before_train(self, engine: Engine) -> None:
        """Try a step of the test; warn if the run has no test."""
        if engine.loaders.test is None or not engine.settings.test:
            if engine.distributed.is_main:
                why = "data.test=null" if engine.loaders.test is None else "engine.test=false"
                log.warning("%s has no effect: the run has no test (%s)", self.key, why)
            return
        for name, loader in sets_of(engine.loaders.test).items():
            with engine.evaluator.without_effect("test", name), engine.task.uncounted():
                self._try(engine, list(islice(loader, 1)))

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
        with self._in_place(engine) as views:
            yield
        if engine.distributed.is_main and not views.called:
            log.warning("%s has no effect: the task's evaluate does not call the forward of its model", self.key)

    @contextmanager
    def _in_place(self, engine: Engine) -> Iterator[Views]:
        """Replace the task's model by the merging model until the end of the block."""
        model, merge = engine.task.model, _MERGES[self._merge_of(engine.task)]
        engine.task.model = Views(model, self._views, merge, turns=self._turns, key=self.key)
        try:
            yield engine.task.model
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

    def _try(self, engine: Engine, batches: list[Any]) -> None:
        try:
            with self._in_place(engine):
                engine.evaluator.run_batches(batches)
        except Exception as error:  # of the user's model, task or view
            if isinstance(error, UserError) and str(error.key).startswith(self.key):
                raise
            try:
                engine.evaluator.run_batches(batches)
            except Exception:  # the views are not the cause: the test itself will report it
                return
            raise UserError(
                f"the test fails with these views and works without them: {describe(error)}",
                key=f"{self.key}.transforms",
                remedy="Use views of the size that the model takes: rot90 and rot270 swap height and width.",
            ) from error
