"""Engine: trains, validates and tests a task, calling hooks at every mount point.

It gets finished objects and builds nothing. `train` is the whole run on one screen; `_train_epoch` and `train_iter`
are its inner loop, `_validate` and `_test` its evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, cast

from torch import Tensor, nn, optim

from hydraloop.engine import run_scope
from hydraloop.engine.accumulation import Pair, Window, mean_of
from hydraloop.engine.checkpoint import optimizer_state, save_load
from hydraloop.engine.checks import check_epoch, check_evaluable, check_hook, check_lengths, check_trainable
from hydraloop.engine.device import seeding
from hydraloop.engine.device.batch_transfer import mover
from hydraloop.engine.device.precision import Precision
from hydraloop.engine.device.prefetch import prefetched, reads_ahead
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.evaluation import evaluate
from hydraloop.engine.hook import Hook, OnError
from hydraloop.engine.hook_order import Slot
from hydraloop.engine.hook_requests import Requests
from hydraloop.engine.inputs import Loader, Loaders, Settings, Stateful, from_position, share_of
from hydraloop.engine.interval import Every
from hydraloop.engine.messages import Messages
from hydraloop.engine.progress import Progress
from hydraloop.engine.stages import Call, Stages
from hydraloop.engine.train_mode import begin_training
from hydraloop.errors import UserError
from hydraloop.run.lock import RunLock
from hydraloop.run.result import Best, Result

Outputs = dict[str, Any]


class Engine:
    """One run. `train()` does all of it: load, train, validate, test, `result.json`.

    Args:
        task: an `nn.Module` whose forward takes a batch and returns a dict with a scalar `loss`. Its modules train in
            the modes (train or eval) that they have.
        optimizer: over the task's parameters; None where nothing is trained.
        loaders: of batches; moved to the device by the engine.
        hooks: by name, in the order of registration.
        slots: the hooks' places (`stages.Slot`); by default from the classes, all of them custom.
        on_error: by name; by default from the classes.
        schedules: by name; stepped by the `param_scheduler` hook, saved by the engine.
        settings: the options.
        run_dir: where this run's files go.
        seed: of the run; the generators are seeded by whoever builds the objects.
        lock: of the run directory, to be held while `train` runs; None: the caller holds it, or needs none.
    """

    def __init__(
        self,
        *,
        task: nn.Module,
        optimizer: optim.Optimizer | None = None,
        loaders: Loaders,
        hooks: Mapping[str, Hook] | None = None,
        slots: Sequence[Slot] | None = None,
        on_error: Mapping[str, OnError] | None = None,
        schedules: Mapping[str, Stateful] | None = None,
        settings: Settings | None = None,
        run_dir: Path = Path("."),
        seed: int = 0,
        distributed: Distributed | None = None,
        precision: Precision | None = None,
        lock: RunLock | None = None,
    ) -> None:
        self.lock = lock
        self.settings = settings or Settings()
        self.distributed = distributed or Distributed()
        self.precision = precision or Precision()
        self.device = self.distributed.device(self.settings.device)
        # A model in shards is where it has to be, and may wait in host memory.
        self.task: Any = cast(Any, task if self.distributed.sharded else task.to(self.device))
        self.loaders = loaders
        self.schedulers = dict(schedules or {})
        self.hooks = dict(hooks or {})
        self.run_dir, self.seed = run_dir, seed
        self._optimizer = optimizer
        self.hyperparameters = [] if optimizer is None else optimizer_state.hyperparameters(optimizer)
        """What the optimizer was given, for each parameter group; schedules change its groups, not this."""
        for name, hook in self.hooks.items():
            check_hook(hook, f"hooks.{name}")
            hook.name, hook.key = name, hook.key or f"hooks.{name}"
        self.stages = Stages.of(self.hooks, slots, on_error, rank=self.distributed.rank)
        self.messages = Messages()
        self.progress = Progress()
        self._move = mover(self.device, self.settings.channels_last)
        self.forward = self.precision.forward(self.distributed.wrap(task))
        """The task's forward, as the ranks and the precision have it."""
        self.evaluate_batch = self.precision.forward(self.task.evaluate)
        """The task's `evaluate`, as the precision has it."""
        self._requests = Requests(self)
        self._validation = Every(self.settings.val_interval, self.settings.val_begin)
        self._evaluation: ExitStack | None = None

        self.accumulate = self.settings.accumulate
        self.epoch_length = 0 if loaders.train is None else len(loaders.train)
        self.max_iters, self.max_epochs = self.settings.horizon(self.epoch_length, self.progress)
        self.metric_names: tuple[str, ...] = tuple(self.task.metric_names)
        self.metrics: dict[str, float] = {}
        """Of the last validation."""
        self.test_metrics: dict[str, float] = {}
        self.best: Best | None = None
        """The best validation, as `report_best` was told; the test uses its checkpoint."""
        self.last_checkpoint: Path | None = None
        """The file written last by this process."""
        self.error: BaseException | None = None
        """What was raised, from on_exception on."""
        self.result: Result | None = None
        """What `result.json` holds, from after_train on."""
        self.evaluating_checkpoint: Path | None = None
        """The file whose weights the test runs on, while it does."""
        self.epoch_begun = 0
        """The epoch (from 1) that training has begun last, also after its end; 0 before the first."""
        self.resumed_in_epoch = False
        """Whether this epoch was begun by an earlier process."""
        self.stepped = False
        """Whether the optimizer stepped in the iteration just done."""
        self.window_closed = True
        """Whether no gradients are waiting for an optimizer step."""
        self.began_at = 0
        """The iteration at which this process went on."""
        self.asked_at = self.data_seconds = 0.0
        """When training asked for its current batch (`perf_counter`), and how long the batch took to come [s]."""
        self.loaded = False
        """Whether `resume` or `load_from` have been done; they are, once an engine."""
        self._window: Window | None = None
        if self.accumulate > 1 or self.distributed.world_size > 1:
            self._window = Window(self.accumulate, self.epoch_length, self.distributed, share_of(loaders.train))

    # The run. --------------------------------------------------------------------------------------------------------

    def train(self) -> Result:
        """The whole run, from before_run to after_run.

        Modules keep the train and eval modes that they have now (`modes.py`): what is in eval mode stays so.

        Raises:
            UserError: an option that does not fit, found before the first iteration.
            BaseException: whatever a hook, the task or the data raised, after on_exception, after_train and after_run.
        """
        at, progress = self.stages, self.progress
        with run_scope.locked(self), run_scope.run(self, write_result=True):
            check_trainable(self)
            rng = save_load.load(self)  # after_load_checkpoint
            begin_training(self.task, self.distributed)
            with run_scope.always(self, at.after_train):
                self._call(at.before_train)
                if rng is not None:  # last of all, so that nothing that starts up moves the generators on
                    seeding.set_rng_state(rng)
                self._requests.act()
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
            self._requests.act()  # the last checkpoint, asked for in after_train
            if self.settings.test and self.loaders.test is not None:
                self._test(Path(self.best.checkpoint) if self.best is not None else None)
        assert self.result is not None
        return self.result

    def _train_epoch(self) -> None:
        """The rest of an epoch, or what is left of it until training ends or stops."""
        at, progress, requests = self.stages, self.progress, self._requests
        by_epoch, first = self.settings.val_by_epoch, progress.batch_in_epoch
        for batch_idx, batch in enumerate(self._train_batches(first), start=first):
            for call in at.before_train_iter:
                call(self, batch_idx, batch)
            outputs = self.train_iter(batch_idx, batch)
            for call in at.after_train_iter:
                call(self, batch_idx, batch, outputs)
            if not self.window_closed or batch_idx + 1 == self.epoch_length:
                continue  # what is due waits for the window's end; at the epoch's last batch, for the epoch's
            if requests.pending or progress.iteration >= requests.next_exchange:
                requests.exchange(progress.iteration)
            if not by_epoch:
                self._validate_if_due()
            if progress.iteration >= self.max_iters or requests.stop_reason is not None:
                break
        check_epoch(self)
        if progress.batch_in_epoch == self.epoch_length:
            progress.epoch, progress.batch_in_epoch = progress.epoch + 1, 0

    def _train_batches(self, first: int) -> Iterator[Any]:
        """The batches of an epoch from the `first` on, on the device. Measures how long each takes to come."""
        self.asked_at = perf_counter()
        for batch in self.on_device(self.loaders.train, first):
            self.data_seconds = perf_counter() - self.asked_at
            yield batch
            self.asked_at = perf_counter()

    def train_iter(self, batch_idx: int, batch: Any) -> Outputs:
        """One iteration: forward, backward, and at the window's end the optimizer step. No host sync.

        Returns:
            What the task returned, `loss` detached.
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
            raise save_load.no_loss(self.task, outputs) from None
        mean = loss if isinstance(loss, Tensor) else mean_of(loss)
        if window is None:
            self.precision.backward(mean)
        else:
            self.precision.backward(window.weigh(loss), window.riding() if closes else None)
        outputs["loss"] = mean.detach()
        for call in at.after_backward:
            call(self, batch_idx, batch, outputs)
        self.stepped = self._step(batch_idx, batch, outputs) if closes else False
        self.window_closed = closes
        progress.iteration += 1
        progress.samples += samples if window is None else window.samples
        progress.batch_in_epoch = batch_idx + 1
        return outputs

    def _step(self, batch_idx: int, batch: Any, outputs: Outputs) -> bool:
        """Close the accumulation window: weight, clip (a hook does), step. Returns whether the step was taken."""
        optimizer = self.optimizer
        self.precision.unscale(optimizer)
        if self._window is not None:
            self._window.correct(optimizer)
        for call in self.stages.before_optimizer_step:
            call(self, batch_idx, batch, outputs)
        taken = self.precision.step(optimizer)
        for group in optimizer.param_groups:  # Optimizer.zero_grad without its 5 µs of profiler and checks.
            for parameter in group["params"]:
                parameter.grad = None
        self.progress.optimizer_step += taken
        return taken

    # Evaluation. -----------------------------------------------------------------------------------------------------

    def _validate(self) -> dict[str, float]:
        at = self.stages
        self._call(at.before_val)
        with self._evaluating():
            self._call(at.before_val_epoch)
            metrics = evaluate(self, self.loaders.val, at.before_val_iter, at.after_val_iter)
        self.metrics = metrics
        self.progress.last_validation = self.progress.iteration
        self._call(at.after_val_epoch, metrics)
        self._call(at.after_val)
        self._requests.act()
        return metrics

    def _test(self, checkpoint: Path | None) -> dict[str, float]:
        at = self.stages
        with save_load.weights_of(self, checkpoint):
            self._call(at.before_test)
            with self._evaluating():
                self._call(at.before_test_epoch)
                metrics = evaluate(self, self.loaders.test, at.before_test_iter, at.after_test_iter)
            self.test_metrics = metrics
            self._call(at.after_test_epoch, metrics)
            self._call(at.after_test)
        self._requests.act()
        return metrics

    def validate(self) -> dict[str, float]:
        """Validate once, on its own, from before_run to after_run. Returns the metrics.

        Raises:
            UserError: there is no validation data.
        """
        check_evaluable(self.loaders.val, "data.val")
        with run_scope.run(self, write_result=False):
            check_lengths(self)
            save_load.load(self)
            return self._validate()

    def test(self, checkpoint: Path | None = None) -> dict[str, float]:
        """Test once, on its own, on the weights of a checkpoint file or those at hand. Returns the metrics.

        Raises:
            UserError: there is no test data, or the file does not fit.
        """
        check_evaluable(self.loaders.test, "data.test")
        with run_scope.run(self, write_result=False):
            check_lengths(self)
            save_load.load(self)
            return self._test(checkpoint)

    def during_evaluation(self, context: AbstractContextManager[Any]) -> None:
        """Enter `context` now and leave it after the last iteration of this validation or test, whatever happens.

        Raises:
            RuntimeError: called elsewhere than in before_val_epoch or before_test_epoch.
        """
        if self._evaluation is None:
            raise RuntimeError("during_evaluation is for before_val_epoch and before_test_epoch")
        self._evaluation.enter_context(context)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        try:
            with ExitStack() as self._evaluation:
                yield
        finally:
            self._evaluation = None

    def validation_due(self) -> bool:
        """Return whether a validation follows: by its interval or at the end of training, once for each iteration."""
        progress, rule = self.progress, self._validation
        if self.loaders.val is None or rule.interval is None or progress.last_validation == progress.iteration:
            return False
        ends = progress.iteration >= self.max_iters or self.stopping
        if self.settings.val_by_epoch:
            return ends or (progress.batch_in_epoch == 0 and rule.due(progress.epoch))
        return rule.due(progress.iteration, done=progress.last_validation, last=ends)

    def _validate_if_due(self) -> None:
        """Validate if it is due. A resumed run begins with this and runs the validation that was missed."""
        if self.validation_due():
            self._validate()

    # Asking and acting. ----------------------------------------------------------------------------------------------

    def request_stop(self, reason: str, *, agreed: bool = False) -> None:
        """Ask for an orderly end: after this window, with the last validation, the last checkpoint and the test.

        With several ranks one that asks is enough. All stop together, at the end of the epoch or validation, or within
        two exchanges (`distributed.agree_interval`) inside an epoch.

        Args:
            agreed: every rank asks at this very point, since counters say so: they stop at once.
        """
        self._requests.stop(reason, agreed=agreed)

    def request_checkpoint(
        self,
        tag: str,
        write: Callable[[Engine], None] | None = None,
        owner: Hook | None = None,
        *,
        agreed: bool = False,
    ) -> None:
        """Ask for a checkpoint, written after all hooks of this mount point, once the accumulation window is closed.

        With several ranks one that asks is enough, unless it brings a `write` that the others do not have: then all of
        them have to. When: see `request_stop`.

        Args:
            tag: one request a tag; the file's stem where `write` is None.
            write: called to write it; None writes `<run_dir>/checkpoints/<tag>.pth`.
            owner: the hook whose work the writing is: its `on_error` counts, and its time.
            agreed: every rank asks at this very point, since counters say so: it is written at once.
        """
        self._requests.checkpoint(tag, write, owner, agreed=agreed)

    @property
    def stopping(self) -> bool:
        """Whether all ranks have agreed to stop."""
        return self._requests.stop_reason is not None

    @property
    def stop_reason(self) -> str | None:
        """Why training stops before its end; None where it does not."""
        return self._requests.stop_reason

    def save_checkpoint(
        self, path: Path, *, optimizer: bool = True, schedulers: bool = True, last: bool = False
    ) -> None:
        """Write the run as it stands to `path`, atomically, by rank 0; before_save_checkpoint is called first.

        Called on every rank.

        Args:
            path: the file.
            optimizer: whether to save the optimizer's state.
            schedulers: whether to save the states of the schedules.
            last: write the file's name to `last_checkpoint` beside it, so that `resume=auto` and restarts continue
                from it.

        Raises:
            OSError: rank 0 could not write it.
            PeerError: the same, on the other ranks.
        """
        checkpoint = save_load.collect(self, optimizer=optimizer, schedulers=schedulers)
        self._call(self.stages.before_save_checkpoint, checkpoint)
        save_load.write_by_main(self, path, checkpoint, last=last)
        self.last_checkpoint = path

    def report_best(self, best: Best) -> None:
        """Tell the engine of a new best validation: `result.json` names it, and the test uses its checkpoint."""
        self.best = best

    def log_record(self, record: Mapping[str, Any]) -> None:
        """Hand a record (plain numbers and strings) to every hook with `on_log`; on rank 0. Any hook may.

        The `logger` hook keeps it in `metrics.jsonl`. Records begin with `mode`, `epoch` and `iteration`
        (`hooks/records.py`).
        """
        if self.distributed.is_main:
            self._call(self.stages.on_log, record)

    # What the run rests on. ------------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The raw model: what `state_dict` in a checkpoint is of."""
        model: nn.Module = self.task.model
        return model

    @property
    def optimizer(self) -> optim.Optimizer:
        """The optimizer.

        Raises:
            UserError: this engine was built without one.
        """
        if self._optimizer is None:
            raise UserError("there is no optimizer to train with", key="optimizer", remedy="Try optimizer=adamw.")
        return self._optimizer

    def on_device(self, loader: Loader | None, first: int = 0) -> Iterator[Any]:
        """The loader's batches from the `first` on, moved to the device."""
        ahead = self.settings.prefetch and reads_ahead(loader)
        return prefetched(from_position(loader or (), first), self._move, self.device, ahead=ahead)

    def forget_earlier_use(self) -> None:
        """Forget how an earlier use of the engine ended: an error, a stop, iterations since the last optimizer step."""
        if self._optimizer is not None and (self.error is not None or not self.window_closed):
            self._optimizer.zero_grad(set_to_none=True)  # what broke off between backward and step left its gradients
        if self._window is not None and not self.window_closed:
            self._window.discard()
        self.error, self.result, self.window_closed = None, None, True
        self._requests.forget_stop()

    def _call(self, calls: Sequence[Call], *args: Any) -> None:
        for call in calls:
            call(self, *args)
