"""Evaluator: when to validate, the validation and the test."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from hydraloop.engine import sanity_step
from hydraloop.engine.batches import Batches
from hydraloop.engine.checkpoint.weights import weights_of
from hydraloop.engine.hook import Call, Mode
from hydraloop.engine.interval import Every
from hydraloop.engine.loaders import Loader, sets_of, share_of
from hydraloop.engine.model_preparation import in_eval_mode
from hydraloop.engine.records import Records, heatmap
from hydraloop.engine.requests import Requests
from hydraloop.engine.run_parts import Run
from hydraloop.engine.seeding import seeded
from hydraloop.engine.validations import Validations
from hydraloop.errors import UserError


class Preempted(BaseException):
    """Ends a validation or test early, because the run is preempted. No hook may catch it."""


class Evaluator:
    """Validates and tests the task of a run.

    Args:
        run: the parts of the run.
        batches: its loaders.
        requests: a preemption ends an evaluation.
        records: get the matrices among the metrics as pictures.
        validations: get the metrics of each validation.
    """

    def __init__(
        self, run: Run, batches: Batches, requests: Requests, records: Records, validations: Validations
    ) -> None:
        self._run = run
        self._batches = batches
        self._requests = requests
        self._records = records
        self._interval = Every(run.settings.val_interval, run.settings.val_begin)
        self._evaluate_batch = run.precision.forward(run.task.evaluate)
        self._contexts: ExitStack | None = None
        self.validations = validations
        self.test_metrics: dict[str, float] = {}
        """The metrics of the last test by name; empty before the first."""
        self.data_set = ""
        """The name of the data set that is being evaluated; empty if there is only one, and between evaluations."""
        self.length = 0
        """The number of batches of the current or last evaluation."""
        self.tested_checkpoint: Path | None = None
        """During a test, the file whose weights are tested. None: the current weights."""

    def during(self, context: AbstractContextManager[Any]) -> None:
        """Enter `context` now, and exit it after the last iteration of this validation or test, also after an error.

        Raises:
            RuntimeError: not called in before_val_epoch or before_test_epoch.
        """
        if self._contexts is None:
            raise RuntimeError("call during in before_val_epoch or before_test_epoch")
        self._contexts.enter_context(context)

    def check_validation(self) -> None:
        """Do the sanity step: evaluate the first validation batches, and use the names of their metrics.

        Called once, on every rank, before before_run.

        Raises:
            Exception: raised by the data set, the collate function or the task.
        """
        settings = self._run.settings
        data_sets = sets_of(self._batches.loaders.val)
        is_done = self.validations.names_are_known
        if is_done or not data_sets or settings.val_interval is None or not settings.sanity_val_steps:
            return
        names = sanity_step.metric_names(self, self._run, self._records, data_sets)
        if names is not None:
            self.validations.metric_names = names
            self.validations.names_are_known = True

    # Validation and test. --------------------------------------------------------------------------------------------

    def validate_if_scheduled(self) -> None:
        """Validate if it is time to. After `pause_after` validations, preempt the run, unless training ends here."""
        if self._is_scheduled():
            self.validate(in_training=True)
        if self._reached_pause() and not self._requests.stopping and not self._run.progress.is_complete:
            self._requests.preempt(self._run.settings.pause, agreed=True)
            self._requests.agree_then_save_or_stop()

    def _is_scheduled(self) -> bool:
        """Return whether to validate now: by the interval or at the end of training, once for each iteration.

        A run that was preempted or stopped by `max_time` does not validate: the resumed run continues as if there had
        been no stop.
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
            self._run.progress.complete_validation()
            self.validations.add(metrics, in_training=in_training)
            calls.after_val_epoch(metrics)
            calls.after_val()
        self._requests.agree_then_save_or_stop()
        return self.validations.metrics

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
        self._requests.agree_then_save_or_stop()
        if is_complete:  # a resumed run would have nothing to do
            self._requests.forget_preemption()
        return self.test_metrics

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
                if preemptible and samples_at is not None:  # all ranks have the same number of batches
                    self._requests.exchange_in_evaluation(batch_idx)
                if preemptible and self._requests.preempted_by is not None:
                    raise Preempted

                # A filler batch has samples of other ranks only. With FSDP2, these ranks need the shard of this rank.
                if samples_at is not None and samples_at(batch_idx)[0] == 0:
                    if self._run.ranks.sharded:
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
