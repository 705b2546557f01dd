"""Engine: trains, validates and tests a task, and calls hooks at every mount point.

`train` is the whole run; `_train_epochs`, `_train_epoch` and `train_iter` are its inner loops. The constructor is in
`state.py`, and what hooks can ask for in `hook_api.py`. The engine gets finished objects and builds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

from torch import Tensor

from hydraloop.engine import evaluation, run_scope
from hydraloop.engine.checkpoint import save_load
from hydraloop.engine.checkpoint.rollback import with_rollbacks
from hydraloop.engine.checkpoint.weights import weights_of
from hydraloop.engine.checks import check_epoch, check_since_record, check_trainable, no_loss_error
from hydraloop.engine.device import seeding
from hydraloop.engine.hook_api import HookApi
from hydraloop.engine.interruption.signals import preemptible
from hydraloop.engine.loaders import Loader
from hydraloop.engine.stepping.accumulation import Pair, weighed
from hydraloop.engine.train_mode import begin_training
from hydraloop.run.result import Result

Outputs = dict[str, Any]


class Engine(HookApi):
    """One run: `train()` loads, trains, validates, tests and writes `result.json`. Arguments: see `EngineState`."""

    def train(self) -> Result:
        """Do the whole run, from before_run to after_run. Modules that are in eval mode now stay in it.

        Raises:
            UserError: an option does not fit; found before the first iteration.
            BaseException: raised by a hook, the task or the data; re-raised after the closing hooks.
        """
        at = self.stages
        with preemptible(self), run_scope.locked(self), run_scope.run(self, write_result=True):
            check_trainable(self)
            self.stepping, self.step = self.optimizer, ""
            rng = save_load.load(self)  # after_load_checkpoint
            begin_training(self.task, self.distributed)
            self._start_clock(perf_counter())
            self._call(at.at_position)
            with run_scope.always(self, at.after_train):
                self._call(at.before_train)
                if rng is not None:  # last, so that no start-up code draws from the generators
                    seeding.set_rng_state(rng)
                with_rollbacks(self, self._requests.act)
                with_rollbacks(self, self._train_epochs)
                self.settle_saves()
                check_since_record(self, self.distributed.gather(self.messages.total("loss")))
            # The last checkpoint, asked for in after_train. A preempted run may go back, to continue from there.
            with_rollbacks(self, self._requests.act)
            self.settle_saves()
            if self.settings.test and self.loaders.test is not None and self.preempted_by is None:
                self._test(Path(self.best.checkpoint) if self.best is not None else None)
            run_scope.check_saved(self)
        assert self.result is not None
        return self.result

    def _train_epochs(self) -> None:
        """Train to the end, from the position of the run on. A validation that was missed comes first."""
        at, progress = self.stages, self.progress
        self._validate_if_due()
        while progress.iteration < self.max_iters and not self.stopping:
            self.epoch_begun = progress.epoch + 1
            self.resumed_in_epoch = progress.batch_in_epoch > 0
            self._call(at.before_train_epoch)
            self._train_epoch()
            if progress.batch_in_epoch == 0:
                self._call(at.after_train_epoch)
                self._requests.act()
            self._validate_if_due()

    def _train_epoch(self) -> None:
        """Train for the rest of an epoch, or until training ends or stops."""
        at, progress, requests = self.stages, self.progress, self._requests
        by_epoch, first = self.settings.val_by_epoch, progress.batch_in_epoch
        train_iter = self.train_iter if self._steps is None else self._steps.train_iter
        left_out = self.left_out.get(progress.epoch, ())
        for batch_idx, batch in enumerate(self._train_batches(first), start=first):
            if left_out and batch_idx in left_out:
                progress.batch_in_epoch = batch_idx + 1
                continue
            for call in at.before_train_iter:
                call(self, batch_idx, batch)
            outputs = train_iter(batch_idx, batch)
            for call in at.after_train_iter:
                call(self, batch_idx, batch, outputs)
            if not self.window_closed or batch_idx + 1 == self.epoch_length:
                continue  # requests and validation wait for the window's end; at the last batch, for the epoch's end
            if requests.pending or progress.iteration >= requests.next_exchange:
                requests.exchange(progress.iteration)
            if not by_epoch:
                self._validate_if_due()
            if progress.iteration >= self.max_iters or requests.stop_reason is not None:
                break
        while progress.batch_in_epoch in left_out:  # at the end of training
            progress.batch_in_epoch += 1
        check_epoch(self)
        if progress.batch_in_epoch == self.epoch_length:
            progress.epoch, progress.batch_in_epoch = progress.epoch + 1, 0

    def _train_batches(self, first: int) -> Iterator[Any]:
        """Yield the batches of an epoch from the `first` on, on the device; measure how long each takes to arrive.

        After `max_time` or `requeue_after`, ask for a stop: the next iteration is the last one, unless ranks must agree
        first.
        """
        loader = self.train_loader
        assert loader is not None  # check_trainable
        left = self.epoch_length - first if self.epoch_length < len(loader) else None
        self.asked_at = perf_counter()
        for batch in self.on_device(self.loaders.train, loader.begin(first, self.progress.iteration), left):
            self.data_seconds = perf_counter() - self.asked_at
            yield batch
            self.asked_at = perf_counter()
            if self.asked_at > self.deadline:
                self._end_by_time()

    def train_iter(self, batch_idx: int, batch: Any) -> Outputs:
        """Do one iteration: forward, backward, and at the window's end the optimizer step. No host sync.

        Returns:
            What the task returned, with `loss` detached.
        """
        at, progress, window = self.stages, self.progress, self._window
        samples = self.task.num_samples(batch)
        closes = True
        if window is not None:
            closes = window.begin(batch_idx, samples, self.max_iters - progress.iteration)
            self.distributed.sync_gradients(closes)
        outputs: Outputs = self.forward(batch)
        try:
            loss: Tensor | Pair = outputs["loss"]
        except (KeyError, TypeError, IndexError):
            raise no_loss_error(self.task, outputs) from None
        self.batch_samples = samples if window is None else window.mine
        mean, self.loss_weights["loss"] = weighed(loss, self.batch_samples)
        if window is None:
            self.precision.backward(mean)
        else:
            self.precision.backward(window.weigh(loss), window.tally_gradient() if closes else None)
        outputs["loss"] = mean.detach()
        for call in at.after_backward:
            call(self, batch_idx, batch, outputs)
        self.stepped = self._step(batch_idx, batch, outputs) if closes else False
        progress.optimizer_step += self.stepped
        self.window_closed = closes
        progress.iteration += 1
        progress.samples += samples if window is None else window.samples
        progress.batch_in_epoch = batch_idx + 1
        return outputs

    def _step(self, batch_idx: int, batch: Any, outputs: Outputs) -> bool:
        """Close the accumulation window: unscale, weight, clip (a hook), step. Return whether the step was taken."""
        optimizer = self.stepping
        self.precision.unscale(optimizer)
        if self._window is not None:
            self._window.correct(optimizer)
        for call in self.stages.before_optimizer_step:
            call(self, batch_idx, batch, outputs)
        taken = self._closure.step(batch_idx, batch, outputs) if self._closure else self.precision.step(optimizer)
        for group in optimizer.param_groups:  # Optimizer.zero_grad without its 5 µs of profiler and checks
            for parameter in group["params"]:
                parameter.grad = None
        return taken

    # Evaluation. -----------------------------------------------------------------------------------------------------

    def validate(self) -> dict[str, float]:
        """Validate once, without training, from before_run to after_run. Return the metrics.

        Raises:
            UserError: there is no validation data.
        """
        with run_scope.without_training(self, "val"):
            return self._validate()

    def test(self, checkpoint: Path | None = None) -> dict[str, float]:
        """Test once, without training, from before_run to after_run. Return the metrics.

        Args:
            checkpoint: the file whose weights are tested; None: the current weights.

        Raises:
            UserError: there is no test data, or the file does not fit.
        """
        with run_scope.without_training(self, "test"):
            return self._test(checkpoint)

    def predict(self, loader: Loader | Literal["test"] = "test") -> Iterator[Any]:
        """Yield the predictions (`task.predict`) for all samples, in order and each once, on the CPU.

        The predictions are those of a test, or of a validation for a loader in `loaders.val`: in eval mode, with `ema`
        and `tta`. Of the hooks, only before_test_epoch or before_val_epoch is called.

        Each item has the predictions of one batch of one rank, so `torch.cat(list(engine.predict()))` has all. With
        several ranks, call it on each one, and iterate to the end; each rank gets the predictions of all. Until the
        end, the engine must not be used for anything else.

        Args:
            loader: of batches, with or without targets. "test": `loaders.test`.

        Raises:
            UserError: there is no test data, or several sets of it; the predictions have no entry for each sample; or,
                with several ranks, the loader does not say which samples each one gets.
        """
        return evaluation.predict_batches(
            self, evaluation.only_test_set(self.loaders) if isinstance(loader, str) else loader
        )

    def _validate_if_due(self) -> None:
        """Validate if it is time to. A resumed run begins with it, and so runs a validation that was missed."""
        if evaluation.validation_due(self):
            self._validate()

    def _validate(self) -> dict[str, float]:
        at = self.stages
        with evaluation.unless_preempted(self), evaluation.in_mode(self, "val"):
            self._call(at.before_val)
            with evaluation.evaluating(self):
                self._call(at.before_val_epoch)
                metrics = evaluation.evaluate(self, self.loaders.val, at.before_val_iter, at.after_val_iter)
            self.metrics = metrics
            self.progress.last_validation = self.progress.iteration
            self._call(at.after_val_epoch, metrics)
            self._call(at.after_val)
        self._requests.act()
        return self.metrics

    def _test(self, checkpoint: Path | None) -> dict[str, float]:
        at, completed = self.stages, False
        with evaluation.unless_preempted(self), evaluation.in_mode(self, "test"), weights_of(self, checkpoint):
            self._call(at.before_test)
            with evaluation.evaluating(self):
                self._call(at.before_test_epoch)
                metrics = evaluation.evaluate(self, self.loaders.test, at.before_test_iter, at.after_test_iter)
            self.test_metrics = metrics
            self._call(at.after_test_epoch, metrics)
            self._call(at.after_test)
            completed = True
        self._requests.act()
        if completed:  # nothing is left for a resumed run
            self.preempted_by = None
        return self.test_metrics
