"""TestTimeAugmentationHook: the test looks at several views of each image and takes their mean."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hydraloop.engine import seeding
from hydraloop.engine.hook import Hook, Priority
from hydraloop.errors import UserError, suggestion
from hydraloop.hooks.views import Merge, View, Views, check_images, mean_output, mean_probability, named_views

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

    Mount points: before_run, before_test_epoch. Priority HIGHEST: every other hook finds the model that will be tested.
    Cost: a test takes as many times as long as there are views; no host sync, no more memory for the model. No state.
    From MMEngine's PrepareTTAHook, and MMPretrain's AverageClsScoreTTA for the probabilities.

    Args:
        transforms: names and callables, at least one; each view counts the same.
        merge: `probabilities`: the mean of the classes' probabilities, handed on as its logarithm, whose softmax it
            is; `outputs`: the mean of the outputs; `auto`: probabilities where the task's loss is torch's cross-entropy
            or NLL, which says that the outputs are logits of classes, else outputs.
        shift: pixels of the transform `shift`, at least 1.

    Raises:
        UserError: an unknown name, no transform, a shift below 1; or the test's inputs are no images. That is seen in
            before_run where one sample can be had at no risk (no worker processes), else at the first test batch.
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

    def before_run(self, engine: Engine) -> None:
        """Refuse test data that has no images, before anything is trained."""
        inputs = _some_inputs(engine.loaders.test) if self._turns else None
        if isinstance(inputs, Tensor):
            check_images(inputs, key=self.key)

    def before_test_epoch(self, engine: Engine) -> None:
        """Put the merging model in the place of the task's model for this test."""
        engine.during_evaluation(self._augmented(engine))

    @contextmanager
    def _augmented(self, engine: Engine) -> Iterator[None]:
        model = engine.task.model
        merge = self._merge
        if merge == "auto":
            merge = "probabilities" if _of_classes(engine.task) else "outputs"
        views = Views(model, self._views, _MERGES[merge], turns=self._turns, key=self.key)
        if engine.distributed.is_main:
            names = ", ".join(
                one if isinstance(one, str) else getattr(one, "__name__", type(one).__name__) for one in self._named
            )
            log.info("%s: the test takes the mean of the %s of %d views (%s)", self.key, merge, len(self._views), names)
        engine.task.model = views
        try:
            yield
        finally:
            engine.task.model = model
        if engine.distributed.is_main and not views.called:
            log.warning(
                "%s: the task's evaluate does not call the forward of its model, so nothing was augmented", self.key
            )


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


def _some_inputs(loader: Any) -> Any:
    """The inputs of a batch of one sample, as the loader would make it; None where they are not known without a risk.

    With worker processes nothing is read: a data set may open files at its first sample, and must do so in each worker.
    """
    if isinstance(loader, Sequence) and loader:
        batch = loader[0]
    elif getattr(loader, "num_workers", None) == 0 and callable(getattr(loader, "collate_fn", None)):
        generators = seeding.rng_state()
        try:
            dataset, fetch = loader.dataset, getattr(loader.dataset, "__getitems__", None)
            batch = loader.collate_fn([dataset[0]] if fetch is None else fetch([0]))
        finally:
            seeding.set_rng_state(generators)
    else:
        return None
    return batch[0] if isinstance(batch, Sequence) and batch else None
