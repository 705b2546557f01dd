"""Engine: the training loop. Each part of a run is an attribute, and owns its state.

A run; `*` marks mount points, at which hooks are called::

    *before_run
    load the checkpoint of resume=
    *after_load_checkpoint  *at_position  *before_train
    for each epoch:
        *before_train_epoch
        for each window (the batches of one optimizer step):
            for each batch of the window:
                *before_train_iter
                forward, backward
                *after_backward
                after the last batch of the window: *before_optimizer_step, then the optimizer step
                (unless a hook has called engine.skip_step)
                *after_train_iter
            requested checkpoints, validation (val_by_epoch=false), a requested stop; not after the last window
        *after_train_epoch
        requested checkpoints, validation, a requested stop
    *after_train
    test; write result.json
    *after_run
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn, optim

from hydraloop.engine.batches import Batches
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.evaluator import Evaluator, check_evaluable
from hydraloop.engine.hook import Hook, OnError
from hydraloop.engine.hook_order import CallTable, Slot, assign_slots, check_needed_hooks
from hydraloop.engine.loaders import Loader, Loaders, epoch_setters
from hydraloop.engine.loss_check import LossCheck
from hydraloop.engine.messages import Messages
from hydraloop.engine.model_preparation import begin_training
from hydraloop.engine.outcome import Outcome
from hydraloop.engine.precision import Precision
from hydraloop.engine.prediction import only_test_set, predict_batches
from hydraloop.engine.progress import Progress
from hydraloop.engine.records import Records
from hydraloop.engine.requests import Requests
from hydraloop.engine.run_parts import Run, Settings, check_task
from hydraloop.engine.save_and_restore import Checkpoints
from hydraloop.engine.seeding import mix_seed, seed_everything
from hydraloop.engine.signals import preemptible
from hydraloop.engine.stepper import Stepper
from hydraloop.engine.task_steps import make_stepper
from hydraloop.engine.validations import Validations
from hydraloop.files.lock import RunLock
from hydraloop.files.result import Best, Result

if TYPE_CHECKING:
    from hydraloop.optim.schedule import Schedule
    from hydraloop.optim.torch_schedule import TorchSchedule


def _forward_to(path: str) -> Any:
    """Return a property that reads an attribute of a part: `max_iters` reads `progress.max_iters`."""
    return property(attrgetter(path))


class Engine:
    """Trains, validates and tests a task, and calls hooks at every mount point.

    The constructor builds the parts. `train` does a whole run. `validate`, `test` and `predict` work without training.
    """

    def __init__(
        self,
        *,
        task: nn.Module,
        loaders: Loaders,
        optimizer: optim.Optimizer | None = None,
        schedules: Mapping[str, Schedule | TorchSchedule] | None = None,
        hooks: Mapping[str, Hook | None] | None = None,
        slots: Sequence[Slot] | None = None,
        on_error: Mapping[str, OnError] | None = None,
        lock: RunLock | None = None,
        settings: Settings | None = None,
        run_dir: Path = Path("."),
        seed: int = 0,
        distributed: Distributed | None = None,
        precision: Precision | None = None,
    ) -> None:
        """Build the parts of a run.

        Args:
            task: an `nn.Module` whose forward takes a batch and returns a dict with a scalar `loss`; it is moved to the
                device.
            loaders: of batches; the engine moves each batch to the device.
            optimizer: over the task's parameters; None if nothing is trained.
            schedules: by name; stepped by the `param_scheduler` hook, saved by the engine.
            hooks: by name, in the order of registration. Schedules need the hook `param_scheduler`. A train loader with
                `set_epoch` needs the hook `sampler_seed`; give `"sampler_seed": None` to train without it.
            slots: when each hook is called at a mount point. Default: by the priority of its class, after default hooks
                of the same priority.
            on_error: what happens if a hook raises an error, by the name of the hook. Default: `on_error` of its class.
            lock: of `run_dir`; `train` acquires and releases it. None: the caller has acquired it, or needs none.
            settings: the options. Default: `Settings()`.
            run_dir: for this run's files; `train` creates it.
            seed: of the run. `train` seeds the global generators by it; the caller seeds them for the initial weights.
            distributed: the ranks. Default: a single process.
            precision: of the forward pass, the backward pass and the optimizer step. Default: fp32.

        Raises:
            UserError: `task` lacks a method or attribute of `hydraloop.Task`, an entry of `hooks` is not a `Hook`, a
                needed hook is missing, or this machine does not have the device.
        """
        if optimizer is not None and loaders.train is not None:
            check_needed_hooks(hooks or {}, scheduled=bool(schedules), has_epochs=bool(epoch_setters(loaders.train)))
        attached_hooks, slots = assign_slots(hooks or {}, slots)
        check_task(task)
        settings = settings or Settings()
        distributed = distributed or Distributed()
        device = distributed.device(settings.device)
        if not distributed.sharded:  # a sharded model is on its device already, or offloaded to host memory
            task = task.to(device)

        self.progress = Progress()
        self.messages = Messages()
        self.calls = CallTable(self, attached_hooks, slots, on_error, rank=distributed.rank)
        # The objects that all other parts use.
        self.run = run = Run(
            task=task,
            optimizer_or_none=optimizer,
            schedules=schedules or {},
            hooks=attached_hooks,
            settings=settings,
            run_dir=run_dir,
            seed=seed,
            device=device,
            ranks=distributed,
            precision=precision or Precision(),
            progress=self.progress,
            messages=self.messages,
            calls=self.calls,
        )
        self.batches = Batches(loaders, run)
        self.progress.set_length(settings, self.batches.epoch_length)
        self.loss_check = LossCheck(run)
        self.validations = Validations(run, loaders)
        self.records = Records(run)
        self.requests = Requests(run, lambda: self.checkpoints)  # `checkpoints` is made later: it uses the requests
        self.evaluator = Evaluator(run, self.batches, self.requests, self.records, self.validations)
        self.checkpoints = Checkpoints(
            run, self.batches, self.validations, self.loss_check, failed=self.requests.report_failed_save
        )
        self.stepper: Stepper = make_stepper(run, self.batches, self.loss_check)
        self.outcome = Outcome(run, self.batches, self.requests, self.evaluator, self.checkpoints)
        self._lock = lock
        run.task.engine = self  # for `forward`, which may log: `self.engine.log_image(…)`

    def train(self) -> Result:
        """Do the whole run, from before_run to after_run. A module that you have put into eval mode stays in it.

        Raises:
            UserError: an option does not fit. Raised before the first iteration.
            BaseException: raised by a hook, the task or the data; re-raised after after_train and after_run.
        """
        # In a resumed run, `restore_generators` later replaces these states by those of the checkpoint. The iteration
        # is in the seed so that a second `train` of this engine draws other numbers than the first.
        seed_everything(mix_seed(self.run.seed, self.distributed.rank, self.progress.iteration))
        with (
            # SIGTERM and other signals request that the run saves and ends.
            preemptible(self.requests, has_failed=lambda: self.outcome.error is not None),
            self.outcome.locked(self._lock),
            # At the start: before_run. At the end, also after an error: result.json and after_run.
            self.outcome.lifecycle(),
        ):
            # Load the checkpoint to resume from. Then hooks set what depends on the position (epoch, iteration).
            self.batches.check_trainable(self.distributed)
            self.checkpoints.load()  # after_load_checkpoint
            begin_training(self.task, is_main=self.distributed.is_main)
            self.stepper.start()
            self.requests.start_time_limit()  # of max_time
            self.calls.at_position()

            with self.outcome.always_calling("after_train"):  # at the end, also after an error
                self.calls.before_train()
                self.checkpoints.restore_generators()  # after all start-up code, which may draw numbers
                self.requests.agree_then_save_or_stop()
                self._train_epochs()
                self.checkpoints.wait_for_save()
                self.loss_check.check()

            # Write the last checkpoint, which hooks request in after_train.
            self.requests.agree_then_save_or_stop()
            self.checkpoints.wait_for_save()
            self.checkpoints.check_weights()  # after after_train, in which hooks find where a loss became NaN

            if self.settings.test and self.loaders.test is not None and self.requests.preempted_by is None:
                self.evaluator.test(self.validations.best_checkpoint)
            self.outcome.check_saved()
        assert self.outcome.result is not None
        return self.outcome.result

    def _train_epochs(self) -> None:
        """Train from the current position, 0 or that of the checkpoint, until `max_iters` or a requested stop."""
        progress = self.progress
        self.evaluator.validate_if_scheduled()  # a run that was preempted did not validate; its resumed run does
        while not progress.is_complete and not self.requests.stopping:
            progress.begin_epoch()
            self.calls.before_train_epoch()
            is_complete = self._train_epoch()
            if is_complete:
                self.calls.after_train_epoch()
                self.requests.agree_then_save_or_stop()
            self.evaluator.validate_if_scheduled()

    def _train_epoch(self) -> bool:
        """Train from the current batch of an epoch to its end, until `max_iters` or a requested stop.

        Returns:
            Whether the epoch is complete.
        """
        progress = self.progress
        for window in self.batches.windows():
            # One optimizer step. A window is the indices of its batches in the epoch: as many as the option
            # engine.accumulate, or fewer at the end.
            for batch_idx in window:
                batch = self.batches.next_batch()  # on the device
                self.calls.before_train_iter(batch_idx, batch)
                outputs = self.stepper.train_batch(window, batch_idx, batch)  # steps after the last batch of the window
                progress.complete_iteration(batch_idx, self.stepper.global_samples, stepped=self.stepper.stepped)
                self.calls.after_train_iter(batch_idx, batch, outputs)

            # Between two windows, no gradients wait for a step: write requested checkpoints, validate, stop. After the
            # last window of the epoch, `_train_epochs` does this, because after_train_epoch comes first.
            if progress.batch_in_epoch < progress.epoch_length:
                self.requests.save_or_stop_if_agreed()  # here, no rank waits for the requests of the others
                if not self.settings.val_by_epoch:
                    self.evaluator.validate_if_scheduled()  # not in a preempted run
                if self.requests.stopping:
                    break

        self.batches.end_epoch()  # drops the iterator of the loader, whose workers would wait
        self.requests.check_time_limit()  # of max_time; `save_or_stop_if_agreed` does it after the other windows
        return progress.complete_epoch_if_done()

    def validate(self) -> dict[str, float]:
        """Validate once, without training, from before_run to after_run. Return the metrics.

        Raises:
            UserError: there is no validation data.
        """
        with self._evaluating("val"):
            return self.evaluator.validate()

    def test(self, checkpoint: Path | None = None) -> dict[str, float]:
        """Test once, without training, from before_run to after_run. Return the metrics.

        Args:
            checkpoint: the file whose weights are tested. None: the weights that the task has (after `resume`).

        Raises:
            UserError: there is no test data, or the file does not fit.
        """
        with self._evaluating("test"):
            return self.evaluator.test(checkpoint)

    @contextmanager
    def _evaluating(self, split: Literal["val", "test"]) -> Iterator[None]:
        """Evaluate in the body, between before_run and after_run, without training."""
        check_evaluable(getattr(self.loaders, split), f"data.{split}")
        with self.outcome.lifecycle(trains=False):
            self.batches.check_lengths(self.distributed, split)
            self.checkpoints.load()  # of `resume`, once
            yield

    def predict(self, loader: Loader | Literal["test"] = "test") -> Iterator[Any]:
        """Yield the predictions (`task.predict`) for all samples, in order and each once, on the CPU.

        See `prediction.predict_batches`.

        Args:
            loader: of batches, with or without targets. "test": `loaders.test`.

        Raises:
            UserError: there is no test data, or several sets of it; or see `predict_batches`.
        """
        if isinstance(loader, str):
            loader = only_test_set(self.loaders)
        return predict_batches(self.run, self.batches, self.evaluator, loader)

    # What hooks read, and what they request. docs/reference/hooks.md describes these names. -------------------------

    task: Any = _forward_to("run.task")
    model: nn.Module = _forward_to("run.model")
    optimizer: optim.Optimizer = _forward_to("run.optimizer")
    hooks: Mapping[str, Any] = _forward_to("run.hooks")
    loaders: Loaders = _forward_to("batches.loaders")
    settings: Settings = _forward_to("run.settings")
    run_dir: Path = _forward_to("run.run_dir")
    device: torch.device = _forward_to("run.device")
    distributed: Distributed = _forward_to("run.ranks")
    max_iters: int = _forward_to("progress.max_iters")
    max_epochs: int = _forward_to("progress.max_epochs")
    metrics: dict[str, float] = _forward_to("validations.metrics")
    best: Best | None = _forward_to("validations.best")
    request_stop: Callable[..., None] = _forward_to("requests.stop")
    request_checkpoint: Callable[..., None] = _forward_to("requests.checkpoint")
    skip_step: Callable[..., None] = _forward_to("stepper.skip_step")
    error: BaseException | None = _forward_to("outcome.error")
    log_record: Callable[[Mapping[str, Any]], None] = _forward_to("records.log_record")
    log_image: Callable[..., Path | None] = _forward_to("records.log_image")
    log_artifact: Callable[..., Path | None] = _forward_to("records.log_artifact")
