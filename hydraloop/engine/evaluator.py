"""Evaluator: when to validate, the validation, the test, and the sanity step before a run."""

from __future__ import annotations

import logging
import math
import random
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hydraloop.engine.batches import Batches
from hydraloop.engine.checkpoint.weights import weights_of
from hydraloop.engine.hook import Call, Mode
from hydraloop.engine.interval import Every
from hydraloop.engine.loaders import Loader, end_workers, sets_of, share_of
from hydraloop.engine.model_preparation import in_eval_mode
from hydraloop.engine.records import Records, heatmap
from hydraloop.engine.requests import Requests
from hydraloop.engine.run import Run
from hydraloop.engine.seeding import seeded
from hydraloop.errors import UserError
from hydraloop.files.result import GREATER_KEYS, LESS_KEYS, Best, by_keys, describe, is_better

log = logging.getLogger(__name__)


class Preempted(BaseException):
    """Ends a validation or test early, because the run is preempted. No hook may catch it."""


class Evaluator:
    """Validates and tests the task of a run, and keeps the metrics.

    Args:
        run: the parts of the run.
        batches: its loaders.
        requests: of the run; a preemption ends an evaluation.
        records: matrices among the metrics are logged as pictures.
    """

    def __init__(self, run: Run, batches: Batches, requests: Requests, records: Records) -> None:
        self._run = run
        self._batches = batches
        self._requests = requests
        self._records = records
        self._interval = Every(run.settings.val_interval, run.settings.val_begin)
        self._evaluate_batch = run.precision.forward(run.task.evaluate)
        self._contexts: ExitStack | None = None
        self._has_warned = False
        self.metrics: dict[str, float] = {}
        """The metrics of the last validation by name; empty before the first."""
        self.test_metrics: dict[str, float] = {}
        """The metrics of the last test by name; empty before the first."""
        self.best: Best | None = None
        """The best validation in training, also before a resume; None before the first, and if it is not known which
        values of the objective are good."""
        self._objective: tuple[str, bool] | None = None
        loaders = batches.loaders
        self._data_sets = tuple(sets_of(loaders.test if loaders.val is None else loaders.val)) or ("",)
        self.metric_names: tuple[str, ...] = tuple(
            f"{name}/{metric}".lstrip("/") for name in self._data_sets for metric in run.task.metric_names
        )
        """Names of the validation metrics. Before `before_run`: the names that the task declares. After it: the names
        that the sanity step has seen."""
        self.names_are_known = False
        """Whether the sanity step has seen the names."""
        self.data_set = ""
        """The name of the data set that is being evaluated; empty if there is only one, and between evaluations."""
        self.length = 0
        """The number of batches of the current or last evaluation."""
        self.tested_checkpoint: Path | None = None
        """During a test, the file whose weights are tested. None: the current weights."""

    # What hooks and other parts ask for. -----------------------------------------------------------------------------

    def during(self, context: AbstractContextManager[Any]) -> None:
        """Enter `context` now, and exit it after the last iteration of this validation or test, also after an error.

        Raises:
            RuntimeError: not called in before_val_epoch or before_test_epoch.
        """
        if self._contexts is None:
            raise RuntimeError("call during in before_val_epoch or before_test_epoch")
        self._contexts.enter_context(context)

    @property
    def objective(self) -> tuple[str, bool | None]:
        """The metric by which validations are compared, and whether its high values are good; None: not known.

        It is the first metric of `save_best`, otherwise the first one of `metric_names`.
        """
        if self._objective is not None:
            return self._objective
        name = next(iter(self.metric_names), "loss")
        return name, self.direction(name)

    def set_objective(self, metric: str, *, higher: bool) -> None:
        """Compare validations by this metric. Called in before_run."""
        self._objective = (metric, higher)

    def set_best_checkpoint(self, iteration: int, checkpoint: Path) -> None:
        """Report the file of the best validation at an iteration. A file of another validation is ignored."""
        if self.best is not None and self.best.iteration == iteration:
            self.best = replace(self.best, checkpoint=str(checkpoint))

    @property
    def best_checkpoint(self) -> Path | None:
        """The file of the best validation, which is tested; None if there is none."""
        return None if self.best is None or self.best.checkpoint is None else Path(self.best.checkpoint)

    def state_dict(self) -> dict[str, Any]:
        """Return the metrics of the last validation, and the best validation without its file, which a hook saves."""
        best = None if self.best is None else (*self.objective, self.best.value, self.best.iteration)
        return {"metrics": dict(self.metrics), "best": best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with these validations. The best one is forgotten if the run has another objective now."""
        self.metrics = dict(state.get("metrics", {}))
        self.best = None
        if best := state.get("best"):
            metric, higher, value, iteration = best
            if (metric, higher) == self.objective:
                self.best = Best(metric, value, iteration)
            else:
                text = "the objective was %s and is %s now: the best validation is one of those that follow"
                log.info(text, metric, self.objective[0])

    def direction(
        self, metric: str, greater_keys: Sequence[str] | None = None, less_keys: Sequence[str] | None = None
    ) -> bool | None:
        """Return whether high values of a metric are good; None if this is not known.

        In this order: the user's key lists; what the metric declares (`higher_is_better`, as in torchmetrics); the
        default key lists, MMEngine's. A key matches a name that it equals, else one that contains it; case does not
        matter.

        Args:
            metric: its name.
            greater_keys: replace `GREATER_KEYS`, unless None.
            less_keys: replace `LESS_KEYS`, unless None.
        """
        given = by_keys(metric, greater_keys or (), less_keys or ())
        if given is not None:
            return given
        # Without the data set's name, which may contain a key: desktop/class_loss contains `top`.
        name = self.without_data_set(metric)
        # None for the loss of an evaluation, which is not a metric; the default lists contain it.
        declared: bool | None = self._run.task.higher_is_better(name)
        if declared is not None:
            return declared
        greater = GREATER_KEYS if greater_keys is None else greater_keys
        less = LESS_KEYS if less_keys is None else less_keys
        return by_keys(name, greater, less)

    @property
    def comparable(self) -> dict[str, float]:
        """The metrics of the last validation where validations are compared.

        If the loss of a data set is NaN, its other metrics are NaN, too: they are of outputs that are NaN, such as the
        share of class 0. With `allow_nan`, all metrics count as they are.
        """
        if self._run.settings.allow_nan:
            return self.metrics
        return {name: math.nan if self._has_nan_loss(name) else value for name, value in self.metrics.items()}

    def _has_nan_loss(self, metric: str) -> bool:
        data_set = metric.removesuffix(self.without_data_set(metric))
        return math.isnan(self.metrics.get(f"{data_set}loss", 0.0))

    def without_data_set(self, metric: str) -> str:
        """Return the name of one of `metric_names` without the data set in front of it."""
        name, _, rest = metric.partition("/")
        return rest if name in self._data_sets and rest else metric

    # The sanity step. ------------------------------------------------------------------------------------------------

    def check_validation(self) -> None:
        """Evaluate the first `engine.sanity_val_steps` batches of the validation, once, to know the names of metrics.

        Called on each rank, before the run begins. The weights are those that the model has been built with.

        Raises:
            Exception: of the data set, the collate function or the task. An error in computing the metrics is a
                warning, because some need more samples.
        """
        settings = self._run.settings
        data_sets = sets_of(self._batches.loaders.val)
        if self.names_are_known or not data_sets or settings.val_interval is None or not settings.sanity_val_steps:
            return
        names: list[str] = []
        try:
            for data_set, loader in data_sets.items():
                with self.without_effect(data_set):
                    metrics = self._first_metrics(loader, settings.sanity_val_steps)
                end_workers(loader)  # hooks may change the data set before the first validation
                if not metrics:
                    return
                names += metrics
        except Exception as error:
            error.add_note(
                "In the sanity step before the run, with the first validation data (engine.sanity_val_steps)."
            )
            raise
        self.metric_names = tuple(names)
        self.names_are_known = True

    def _first_metrics(self, loader: Loader, steps: int) -> dict[str, float]:
        """Return the metrics over the first batches of a loader; an empty dict if they are not known."""
        self.run_batches(loader, most=steps)
        try:
            return self.compute()
        except UserError:
            raise
        except Exception as error:  # of a metric
            if self._run.ranks.is_main:
                log.warning(
                    "the metrics cannot be computed from %d batch%s, so their names are not checked: %s",
                    self.length, "" if self.length == 1 else "es", describe(error),
                )  # fmt: skip
            return {}

    # Validation and test. --------------------------------------------------------------------------------------------

    def validate_if_scheduled(self) -> None:
        """Validate if it is time to. After `pause_after` validations, preempt the run, unless training ends here."""
        if self._is_scheduled():
            self.validate(in_training=True)
        if self._reached_pause() and not self._requests.stopping and not self._run.progress.is_complete:
            self._requests.preempt(self._run.settings.pause, agreed=True)
            self._requests.save_or_stop_if_requested()

    def _is_scheduled(self) -> bool:
        """Return whether to validate now: by the interval or at the end of training, once for each iteration.

        A stop by `max_time` is not an end: a resumed run trains on, as if it had never stopped. A preempted run does
        not validate; a resumed run does it instead.
        """
        progress = self._run.progress
        settings = self._run.settings
        if self._requests.preempted_by is not None or self._batches.loaders.val is None:
            return False
        if settings.val_interval is None or progress.last_validation == progress.iteration:
            return False
        if progress.is_complete or self._requests.stopping_for_good:
            return True
        if settings.val_by_epoch:
            return progress.batch_in_epoch == 0 and self._interval.fires_at(progress.epoch)
        # In a resumed run, a validation may have been missed.
        return self._interval.times_until(progress.iteration) > self._interval.times_until(progress.last_validation)

    def _reached_pause(self) -> bool:
        """Return whether the run has had `pause_after` validations; also after a resume from there."""
        settings = self._run.settings
        if settings.pause_after is None or self._batches.loaders.val is None:
            return False
        position = self._run.progress.epoch if settings.val_by_epoch else self._run.progress.iteration
        return self._interval.times_until(position) >= settings.pause_after

    def validate(self, *, in_training: bool = False) -> dict[str, float]:
        """Validate, then act on requests. Return the metrics of the last complete validation.

        A preempted run does not finish it; a resumed run validates instead.

        Args:
            in_training: whether it may be the best validation.
        """
        calls = self._run.calls
        with suppress(Preempted), self._run.progress.in_mode("val"):
            calls.before_val()
            with self.evaluating():
                calls.before_val_epoch()
                loaders = sets_of(self._batches.loaders.val)
                metrics = self._evaluate(loaders, calls.before_val_iter, calls.after_val_iter)
            self.metrics = metrics
            self._warn_of_nan()
            self._run.progress.complete_validation()
            if in_training:
                self._update_best()
            calls.after_val_epoch(metrics)
            calls.after_val()
        self._requests.save_or_stop_if_requested()
        return self.metrics

    def _update_best(self) -> None:
        """Compare the last validation with the best one."""
        name, higher = self.objective
        if higher is None or name not in self.metrics:
            return
        best = None if self.best is None else self.best.value
        if is_better(self.comparable[name], best, higher=higher):
            self.best = Best(name, self.metrics[name], self._run.progress.iteration)

    def test(self, checkpoint: Path | None) -> dict[str, float]:
        """Test, then act on requests. Return the metrics. A preempted run does not finish the test.

        Args:
            checkpoint: the file whose weights are tested; None: the current weights.
        """
        calls = self._run.calls
        is_complete = False
        with suppress(Preempted), self._run.progress.in_mode("test"), self._weights_of(checkpoint):
            calls.before_test()
            with self.evaluating():
                calls.before_test_epoch()
                loaders = sets_of(self._batches.loaders.test)
                metrics = self._evaluate(loaders, calls.before_test_iter, calls.after_test_iter)
            self._requests.agree()
            if self._requests.preempted_by is not None:
                raise Preempted
            self.test_metrics = metrics
            calls.after_test_epoch(metrics)
            calls.after_test()
            is_complete = True
        self._requests.save_or_stop_if_requested()
        if is_complete:  # a resumed run would have nothing to do
            self._requests.forget_preemption()
        return self.test_metrics

    def _warn_of_nan(self) -> None:
        """Warn once if metrics that are not NaN count as NaN."""
        names = [name for name, value in self.comparable.items() if math.isnan(value) > math.isnan(self.metrics[name])]
        if names and self._run.ranks.is_main and not self._has_warned:
            self._has_warned = True
            log.warning(
                "the validation loss is nan at iteration %d, so %s counts as nan, too, where validations are compared "
                "(best checkpoints, early stopping, schedules, objective); engine.allow_nan=true lets it count",
                self._run.progress.iteration, ", ".join(names),
            )  # fmt: skip

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """In the body, `during` may enter contexts; they are exited at its end."""
        try:
            with ExitStack() as self._contexts:
                yield
        finally:
            self._contexts = None
            self.data_set = ""

    @contextmanager
    def without_effect(self, data_set: str) -> Iterator[None]:
        """In the body, validate without any effect on the run: generators, buffers, metrics, records, compiled code.

        torch.compile has no effect in the body. Otherwise, the shapes of the first training batch would not be the
        first that it sees, and it would compile other code for training.
        """
        task = self._run.task
        is_compiled = "torch._dynamo" in sys.modules
        eager: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()
        buffers = {name: buffer.clone() for name, buffer in task.named_buffers()}
        self.data_set = data_set
        try:
            with (
                self._records.muted(),
                self._run.progress.in_mode("val"),
                eager,
                seeded(self._run.seed),
                warnings.catch_warnings(),
            ):
                warnings.simplefilter("ignore")  # metrics warn about few samples
                yield
                task.reset_metrics()
        finally:
            self.data_set = ""
            for name, buffer in task.named_buffers():  # a module may count its calls
                if name in buffers and buffers[name].shape == buffer.shape:
                    buffer.copy_(buffers[name])

    @contextmanager
    def _weights_of(self, checkpoint: Path | None) -> Iterator[None]:
        self.tested_checkpoint = checkpoint
        try:
            with weights_of(self._run, checkpoint):
                yield
        finally:
            self.tested_checkpoint = None

    def _evaluate(self, loaders: Mapping[str, Loader], before: Call, after: Call) -> dict[str, float]:
        """Evaluate each data set and return the metrics over all ranks' samples, the same on each rank.

        Two host syncs for each data set.
        """
        metrics: dict[str, float] = {}
        for name, loader in loaders.items():
            self.data_set = name
            with seeded(self.seed_of(self._run.progress.mode, name)):
                self.run_batches(loader, before, after, preemptible=True)
                metrics |= self.compute()
        return metrics

    def seed_of(self, mode: Mode, data_set: str) -> int:
        """Return a seed for the random numbers of an evaluation on this rank.

        So the same weights have the same metrics in each evaluation, and training does not depend on validations.
        """
        return random.Random(f"{self._run.seed}/{self._run.ranks.rank}/{mode}/{data_set}").getrandbits(63)

    @torch.no_grad()
    def run_batches(
        self,
        loader: Loader,
        before: Call | None = None,
        after: Call | None = None,
        most: int | None = None,
        *,
        preemptible: bool = False,
    ) -> None:
        """Reset the metrics and add the batches of a loader, with all modules in eval mode; called on every rank.

        Args:
            loader: of the data set.
            before: called before each batch.
            after: called after each batch.
            most: the number of batches at most; None: no limit.
            preemptible: whether a preemption raises `Preempted` between two batches.
        """
        task = self._run.task
        samples_at = share_of(loader)
        length = len(loader)
        self.length = self._run.settings.limited(self._run.progress.mode, length)
        if most is not None:
            self.length = min(self.length, most)
        with in_eval_mode(task), equal_buffers(self._run):
            task.reset_metrics()
            count = self.length if self.length < length else None
            # The iterator has no name: after an error, the traceback would keep it with its workers.
            for batch_idx, batch in enumerate(self._batches.on_device(loader, count=count)):
                if preemptible:
                    if samples_at is not None:  # all ranks have equally many batches
                        self._requests.exchange_in_evaluation(batch_idx)
                    if self._requests.preempted_by is not None:
                        raise Preempted
                if samples_at is not None and samples_at(batch_idx)[0] == 0:  # only other ranks have samples in it
                    if self._run.ranks.sharded:  # they need this rank's shard
                        with task.uncounted():
                            self._evaluate_batch(batch)
                    continue
                if before is not None:
                    before(batch_idx, batch)
                outputs = self._evaluate_batch(batch)
                if after is not None:
                    after(batch_idx, batch, outputs)

    @torch.no_grad()
    def compute(self) -> dict[str, float]:
        """Return the metrics over all batches since the last reset; called on every rank. Two host syncs."""
        task = self._run.task
        ranks = self._run.ranks
        metrics: dict[str, float] = ranks.from_main(task.compute_metrics(ranks.sum, ranks.gather))
        prefix = f"{self.data_set}/" if self.data_set else ""
        for name, matrix in task.pictures.items():
            self._records.log_image(prefix + name, heatmap(matrix) if ranks.is_main else None)
        return {prefix + name: value for name, value in metrics.items()}


@contextmanager
def equal_buffers(run: Run) -> Iterator[None]:
    """In the body, all ranks have rank 0's buffers."""
    run.ranks.before_evaluation(run.task)
    try:
        yield
    finally:
        run.ranks.after_evaluation()


def check_evaluable(loader: Loader | Mapping[str, Loader] | None, key: str) -> None:
    """Refuse to evaluate without a loader; `key` names its option."""
    if loader is None:
        split = key.removeprefix("data.")
        remedy = f"Give {key} a data set. For the engine of a finished run: hydraloop.load(…, splits=['{split}'])."
        raise UserError("there is no data set", key=key, remedy=remedy)
