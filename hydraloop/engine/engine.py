"""Engine: a whole run on one screen. Each part of a run is an attribute, and owns its state. A run::

before_run
load, after_load_checkpoint, at_position, before_train
for each epoch: before_train_epoch
    for each window (one optimizer step), for each of its batches:
        before_train_iter, forward, backward, after_backward
        (with the last batch: before_optimizer_step, optimizer step), after_train_iter
    after_train_epoch; between windows and epochs: checkpoints, validation, a stop
after_train, test, result.json, after_run
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
from hydraloop.engine.call_table import CallTable, Slot, check_needed, in_place
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.evaluator import Evaluator, check_evaluable
from hydraloop.engine.hook import Hook, OnError
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
from hydraloop.engine.run import Run, Settings, check_task
from hydraloop.engine.save_and_restore import Checkpoints
from hydraloop.engine.seeding import mix_seed, seed_everything
from hydraloop.engine.signals import preemptible
from hydraloop.engine.stepper import Stepper
from hydraloop.engine.task_steps import make_stepper
from hydraloop.files.lock import RunLock
from hydraloop.files.result import Best, Result

if TYPE_CHECKING:
    from hydraloop.optim.schedule import Schedule
    from hydraloop.optim.torch_schedule import TorchSchedule


def _of(path: str) -> Any:
    """Return a property that reads an attribute of a part."""
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
                device. Each of its modules keeps its mode (train or eval) in training.
            loaders: of batches; the engine moves them to the device.
            optimizer: over the task's parameters; None if nothing is trained.
            schedules: by name; stepped by the `param_scheduler` hook, saved by the engine.
            hooks: by name, in the order of registration. To train with schedules, `param_scheduler` must be one of
                them; with a train loader that has `set_epoch`, `sampler_seed`, which is None to leave it out.
            slots: the hooks' places (`call_table.Slot`); by default from the classes, all given ones custom.
            on_error: by name; by default from the classes.
            lock: of the run directory, to be held while `train` runs; None: the caller holds it, or needs none.
            settings: the options; None: the defaults.
            run_dir: for this run's files; `train` creates it.
            seed: of the run. `train` seeds the global generators by it; the caller seeds them for the initial weights.
            distributed: the ranks; None: a single process.
            precision: None: fp32.

        Raises:
            UserError: the task is not a task, a hook is not a hook, or this machine does not have the device.
        """
        if optimizer is not None and loaders.train is not None:
            check_needed(hooks or {}, scheduled=bool(schedules), has_epochs=bool(epoch_setters(loaders.train)))
        attached, slots = in_place(hooks or {}, slots)
        check_task(task)
        settings = settings or Settings()
        ranks = distributed or Distributed()
        device = ranks.device(settings.device)
        if not ranks.sharded:  # a sharded model is on its device already, or waits in host memory
            task = task.to(device)

        self.progress = Progress()
        self.messages = Messages()
        self.calls = CallTable(self, attached, slots, on_error, rank=ranks.rank)
        self.run = run = Run(
            task=task,
            trained_by=optimizer,
            schedules=schedules or {},
            hooks=attached,
            settings=settings,
            run_dir=run_dir,
            seed=seed,
            device=device,
            ranks=ranks,
            precision=precision or Precision(),
            progress=self.progress,
            messages=self.messages,
            calls=self.calls,
        )
        self.batches = Batches(loaders, run)
        self.progress.set_length(settings, self.batches.epoch_length)
        self.loss_check = LossCheck(run)
        self.records = Records(run)
        self.requests = Requests(run, lambda: self.checkpoints)
        self.evaluator = Evaluator(run, self.batches, self.requests, self.records)
        self.checkpoints = Checkpoints(run, self.batches, self.evaluator, self.loss_check, self.requests.save_failed)
        self.stepper: Stepper = make_stepper(run, self.batches, self.loss_check)
        self.outcome = Outcome(run, self.batches, self.requests, self.evaluator, self.checkpoints)
        self._lock = lock
        run.task.engine = self

    def train(self) -> Result:
        """Do the whole run, from before_run to after_run. Modules that are in eval mode now stay in it.

        Raises:
            UserError: an option does not fit; found before the first iteration.
            BaseException: raised by a hook, the task or the data; re-raised after the closing hooks.
        """
        seed_everything(mix_seed(self.run.seed, self.distributed.rank, self.progress.iteration))
        with (
            preemptible(self.requests, has_failed=lambda: self.outcome.error is not None),  # by signals
            self.outcome.locked(self._lock),
            self.outcome.around_run(),  # before_run; at the end, also after an error: result.json and after_run
        ):
            # Load the checkpoint to resume from; then set what follows from the position.
            self.batches.check_trainable(self.distributed)
            self.checkpoints.load()  # after_load_checkpoint
            begin_training(self.task, is_main=self.distributed.is_main)
            self.stepper.start()
            self.requests.start_clock()
            self.calls.at_position()

            with self.outcome.closing("after_train"):  # also after an error
                self.calls.before_train()
                self.checkpoints.restore_generators()  # last, so that no start-up code draws from the generators
                self.requests.act()
                self._train_epochs()
                self.checkpoints.wait_for_save()
                self.loss_check.check()

            # Write the last checkpoint, which hooks have requested in after_train.
            self.requests.act()
            self.checkpoints.wait_for_save()
            self.checkpoints.check_weights()  # after after_train, in which hooks find where a loss became NaN

            if self.settings.test and self.loaders.test is not None and self.requests.preempted_by is None:
                self.evaluator.test(Path(self.best.checkpoint) if self.best is not None else None)
            self.outcome.check_saved()
        assert self.outcome.result is not None
        return self.outcome.result

    def _train_epochs(self) -> None:
        """Train from the position of the run to the end, or until a stop."""
        progress = self.progress
        self.evaluator.validate_if_scheduled()  # a resumed run may have missed one
        while not progress.is_complete and not self.requests.stopping:
            progress.begin_epoch()
            self.calls.before_train_epoch()
            self._train_epoch()
            if progress.batch_in_epoch == 0:  # all batches of the epoch are done
                self.calls.after_train_epoch()
                self.requests.act()
            self.evaluator.validate_if_scheduled()

    def _train_epoch(self) -> None:
        """Train for the rest of an epoch, or until training ends or stops."""
        calls = self.calls
        batches = self.batches
        progress = self.progress
        requests = self.requests
        stepper = self.stepper
        validates_in_epoch = not self.settings.val_by_epoch
        for window in batches.windows():  # the batches of one optimizer step
            for batch_idx in window:
                batch = batches.fetch(batch_idx)  # on the device
                calls.before_train_iter(batch_idx, batch)
                outputs = stepper.train_batch(window, batch_idx, batch)  # the last one ends with the optimizer step
                progress.complete_iteration(batch_idx, stepper.samples_of_all, stepped=stepper.stepped)
                calls.after_train_iter(batch_idx, batch, outputs)

            # Between two windows, act on requests and validate. At the end of an epoch, its hooks come first.
            if progress.batch_in_epoch < progress.epoch_length:
                requests.act_in_epoch()
                if validates_in_epoch:
                    self.evaluator.validate_if_scheduled()
                if requests.stopping:
                    break
        batches.end_epoch()
        requests.check_clock()
        progress.complete_epoch()

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
            checkpoint: the file whose weights are tested; None: the current weights.

        Raises:
            UserError: there is no test data, or the file does not fit.
        """
        with self._evaluating("test"):
            return self.evaluator.test(checkpoint)

    @contextmanager
    def _evaluating(self, split: Literal["val", "test"]) -> Iterator[None]:
        check_evaluable(getattr(self.loaders, split), f"data.{split}")
        with self.outcome.around_run(trains=False):
            self.batches.check_lengths(self.distributed)
            self.checkpoints.load()
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

    # What hooks read, and what they ask for. docs/reference/hooks.md describes these names. -------------------------

    task: Any = _of("run.task")
    model: nn.Module = _of("run.model")
    optimizer: optim.Optimizer = _of("run.optimizer")
    hooks: Mapping[str, Any] = _of("run.hooks")
    loaders: Loaders = _of("batches.loaders")
    settings: Settings = _of("run.settings")
    run_dir: Path = _of("run.run_dir")
    device: torch.device = _of("run.device")
    distributed: Distributed = _of("run.ranks")
    max_iters: int = _of("progress.max_iters")
    max_epochs: int = _of("progress.max_epochs")
    metrics: dict[str, float] = _of("evaluator.metrics")
    best: Best | None = _of("evaluator.best")
    request_stop: Callable[..., None] = _of("requests.stop")
    request_checkpoint: Callable[..., None] = _of("requests.checkpoint")
    skip_step: Callable[..., None] = _of("stepper.skip_step")
    error: BaseException | None = _of("outcome.error")
    log_record: Callable[[Mapping[str, Any]], None] = _of("records.log_record")
    log_image: Callable[..., Path | None] = _of("records.log_image")
    log_artifact: Callable[..., Path | None] = _of("records.log_artifact")
