"""EngineState: the parts and the state of an engine. The loop is in `engine.py`."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from torch import nn, optim

from hydraloop.engine.checkpoint import optimizer_state
from hydraloop.engine.checkpoint.format import Checkpoint
from hydraloop.engine.checkpoint.initial_weights import load_from
from hydraloop.engine.checkpoint.saver import Saver
from hydraloop.engine.checks import check_hook, check_task
from hydraloop.engine.device.batch_transfer import mover
from hydraloop.engine.device.precision import Precision
from hydraloop.engine.device.prefetch import prefetched, reads_ahead
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.hook import Hook, OnError
from hydraloop.engine.hook_order import Slot, with_missing
from hydraloop.engine.hook_requests import Requests
from hydraloop.engine.interval import Every
from hydraloop.engine.loaders import Loader, Loaders, TrainLoader, sets_of, share_of
from hydraloop.engine.messages import Messages
from hydraloop.engine.progress import Progress
from hydraloop.engine.ready_loader import as_train_loader
from hydraloop.engine.records.objects import LogsRecords
from hydraloop.engine.settings import Settings, seconds_of
from hydraloop.engine.stages import Call, Stages
from hydraloop.engine.stepping.accumulation import Window
from hydraloop.engine.stepping.closure import Closure, closure_of
from hydraloop.engine.stepping.groups import Group, describe
from hydraloop.engine.stepping.several import parts
from hydraloop.engine.stepping.steps import make_steps
from hydraloop.errors import UserError
from hydraloop.run.lock import RunLock
from hydraloop.run.result import Best, Result

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine


class Stateful(Protocol):
    """What the engine needs of a schedule."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
    def sets(self, name: str, optimizer: optim.Optimizer) -> bool:
        """Return whether it sets this entry of the optimizer's groups (`lr`) to numbers from the config."""


class EngineState(LogsRecords):
    """The parts and the state of a run.

    Args:
        task: an `nn.Module` whose forward takes a batch and returns a dict with a scalar `loss`. Each of its modules
            keeps its mode (train or eval) in training.
        optimizer: over the task's parameters; None if nothing is trained.
        loaders: of batches; the engine moves them to the device.
        hooks: by name, in the order of registration. An engine that trains adds `sampler_seed`, and with schedules
            `param_scheduler`, if they are not given. `{"sampler_seed": None}` leaves it out.
        slots: the hooks' places (`hook_order.Slot`); by default from the classes, all given ones custom.
        on_error: by name; by default from the classes.
        schedules: by name; stepped by the `param_scheduler` hook, saved by the engine.
        settings: the options.
        run_dir: for this run's files.
        seed: of the run; the caller seeds the generators.
        distributed: the ranks; None: a single process.
        precision: None: fp32.
        lock: of the run directory, to be held while `train` runs; None: the caller holds it, or needs none.
    """

    metrics: dict[str, float]
    """Of the last validation."""
    test_metrics: dict[str, float]
    """Of the last test."""
    best: Best | None = None
    """The best validation (`report_best`); the test uses its checkpoint."""
    last_checkpoint: Path | None = None
    """The last file that this process has written."""
    saved_iteration: int = 0
    """The iteration of that file."""
    unwritten: Path | None = None
    """A newer one to resume from that could not be written."""
    error: BaseException | None = None
    """The error that ends the run, from on_exception on."""
    result: Result | None = None
    """The contents of `result.json`, between after_train and after_run."""
    evaluating_checkpoint: Path | None = None
    """During a test, the file whose weights are tested."""
    epoch_begun: int = 0
    """Number (from 1) of the last epoch that has begun, also after its end; 0 before the first."""
    resumed_in_epoch: bool = False
    """Whether an earlier process began this epoch."""
    stepped: bool = False
    """Whether an optimizer stepped in the iteration just completed."""
    stepping: optim.Optimizer
    """In training, the optimizer whose step is being done; outside of the steps of a task, `optimizer`."""
    step: str = ""
    """The name of the task's step that is being done, if the task has steps."""
    window_closed: bool = True
    """Whether the accumulation window is closed, so that there are no gradients before an optimizer step."""
    began_at: int = 0
    """The iteration at which this process began or resumed."""
    resumed_from: Path | None = None
    """The checkpoint whose state was restored last: that of `resume`, or after a rollback an earlier one."""
    left_out: Mapping[int, Collection[int]]
    """By epoch (from 0), the batches that are not trained on (`leave_out`)."""
    asked_at: float = 0.0
    """When training asked for its current batch (`perf_counter`)."""
    deadline: float = math.inf
    """When training stops because of `engine.max_time` or `engine.requeue_after` (`perf_counter`)."""
    requeue_at: float = math.inf
    """When training is preempted because of `engine.requeue_after` (`perf_counter`)."""
    preemptible: bool = False
    """Whether a signal preempts the run: from the start of training until `result.json` is written."""
    preempted_by: str | None = None
    """Why the run saves and ends, to be continued later (`preempt`); None if it does not, or ranks have not agreed."""
    data_seconds: float = 0.0
    """How long training waited for its current batch [s]."""
    loaded: bool = False
    """Whether `resume` has been done, and after_load_checkpoint called, which happens once for each engine."""
    loaded_from: Checkpoint | None = None
    """The contents of `load_from` until after_load_checkpoint; tensors are read from the file when they are used."""
    train_loader: TrainLoader | None
    """`loaders.train`, in a `ReadyLoader` if it does not know its position; used for iterations and checkpoints."""
    metric_names: tuple[str, ...]
    """Of the metrics of a validation: those that the task declares; from before_run on, those of the sanity step."""
    matrix_names: tuple[str, ...] = ()
    """Of the metrics that are a matrix, found by the sanity step; they are logged as pictures."""
    data_set: str = ""
    """The name of the data set that is being evaluated, if there are several."""
    tried: bool = False
    """Whether the sanity step has been done, which happens once for each engine."""
    evaluation_length: int = 0
    """The number of batches of the current or last evaluation."""
    git: dict[str, str | bool]
    """The code with which this process trains (`code_patch.record`); only on rank 0."""
    generators: dict[str, Any] | None = None
    """The states of this engine's random generators between two uses. None: it draws from the process's generators."""
    _window: Window | None = None
    _closure: Closure | None = None
    """Takes the steps of optimizers that evaluate the loss themselves (LBFGS, SAM)."""
    _evaluation: ExitStack | None = None

    def __init__(
        self,
        *,
        task: nn.Module,
        optimizer: optim.Optimizer | None = None,
        loaders: Loaders,
        hooks: Mapping[str, Hook | None] | None = None,
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
        super().__init__()
        self.settings = settings or Settings()
        self.distributed = distributed or Distributed()
        self.precision = precision or Precision()
        self.device = self.distributed.device(self.settings.device)
        check_task(task)
        # A sharded model is on its device, or waits in host memory.
        self.task: Any = cast(Any, task if self.distributed.sharded else task.to(self.device))
        self.task.engine = self
        self.loaders, self.schedulers = loaders, dict(schedules or {})
        self.run_dir, self.seed, self.lock, self.git = run_dir, seed, lock, {}
        for name, given in (hooks or {}).items():
            if given is not None:
                check_hook(given, f"hooks.{name}")
        trains = optimizer is not None and loaders.train is not None
        self.hooks, places = with_missing(hooks or {}, slots, trains=trains, scheduled=bool(self.schedulers))
        for name, hook in self.hooks.items():
            hook.name, hook.key = name, hook.key or f"hooks.{name}"
        self.stages = Stages(self.hooks, places, on_error, rank=self.distributed.rank)
        self.messages, self.progress, self.left_out = Messages(), Progress(), {}
        self.accumulate = self.settings.accumulate
        self.epoch_length = self.settings.limited("train", len(self.train_loader or ()))
        self.max_iters, self.max_epochs = self.settings.training_length(self.epoch_length, self.progress)
        self._val_sets = tuple(sets_of(loaders.test if loaders.val is None else loaders.val)) or ("",)
        self.metric_names = tuple(
            f"{name}/{metric}".lstrip("/") for name in self._val_sets for metric in self.task.metric_names
        )

        load_from(cast("Engine", self))
        self._optimizer = optimizer
        self.hyperparameters = [] if optimizer is None else optimizer_state.hyperparameters(optimizer)
        """The optimizer's numbers for each parameter group, before any schedule."""
        self._steps = make_steps(cast("Engine", self))
        if self._steps is not None:
            self.distributed.start_equal(task)
        self.forward = self.precision.forward(task if self._steps else self.distributed.wrap(task))
        """The task's forward, in DDP (not if the task has steps) and under autocast if the run uses them."""
        self.evaluate_batch = self.precision.forward(self.task.evaluate)
        """The task's `evaluate`, under autocast if the run uses it."""
        self._requests = Requests(cast("Engine", self))
        self._saver = Saver(self.distributed, self._requests.wake)
        self._move = mover(self.device, self.settings.channels_last)
        if self.accumulate > 1 or self.distributed.world_size > 1:
            self._window = Window(self.accumulate, self.epoch_length, self.distributed, share_of(loaders.train))
        if optimizer is not None:
            self._closure = closure_of(cast("Engine", self), parts(optimizer))
        self._validation = Every(self.settings.val_interval, self.settings.val_begin)
        self.metrics, self.test_metrics = {}, {}

    @property
    def loaders(self) -> Loaders:
        """The loaders. Others of the same lengths may be set between two runs."""
        return self._loaders

    @loaders.setter
    def loaders(self, loaders: Loaders) -> None:
        self._loaders = loaders
        self.train_loader = None if loaders.train is None else as_train_loader(loaders.train)

    @property
    def model(self) -> nn.Module:
        """The raw model, whose `state_dict` is in checkpoints."""
        model: nn.Module = self.task.model
        return model

    @property
    def optimizer(self) -> optim.Optimizer:
        """The optimizer; with several, all of them as one (`Several`).

        Raises:
            UserError: this engine was built without one.
        """
        if self._optimizer is None:
            remedy = "To train with the weights of a run, use hydraloop.build with load_from=outputs/<date>/<run>."
            raise UserError("there is no optimizer: this engine only evaluates", key="optimizer", remedy=remedy)
        return self._optimizer

    @property
    def optimizers(self) -> dict[str, optim.Optimizer]:
        """The optimizers by name; the name of a single one is empty."""
        return parts(self.optimizer)

    @property
    def groups(self) -> list[Group]:
        """The names of the parameters in each group, in the order of `optimizer.param_groups`."""
        return describe(self.optimizer, self.model)

    def higher_is_better(self, metric: str) -> bool | None:
        """Return whether high values of one of `metric_names` are good; None if the metric does not say."""
        found: bool | None = self.task.higher_is_better(self.without_set(metric))
        return found

    def without_set(self, metric: str) -> str:
        """Return the name of one of `metric_names` without the data set in front of it."""
        name, _, rest = metric.partition("/")
        return rest if name in self._val_sets and rest else metric

    def on_device(
        self, loader: Loader | None, batches: Iterable[Any] | None = None, count: int | None = None
    ) -> Iterator[Any]:
        """Iterate over `batches` of the loader (None: all of them), at most `count`, moved to the device."""
        ahead = self.settings.prefetch and reads_ahead(loader)
        found = loader or () if batches is None else batches
        return prefetched(found if count is None else islice(found, count), self._move, self.device, ahead=ahead)

    def rewrap(self) -> None:
        """Wrap the task again after `requires_grad` of parameters has changed, on every rank.

        DDP averages only the gradients of parameters that required them when it wrapped the task. A task with steps
        is not wrapped.

        Raises:
            RuntimeError: called inside an accumulation window, whose gradients would be lost.
        """
        if not self.window_closed:
            raise RuntimeError("call rewrap between two accumulation windows")
        if self._steps is not None:
            return
        self.forward = self.evaluate_batch  # so that `wrap` can free the old wrapper
        self.forward = self.precision.forward(self.distributed.wrap(self.task, again=True))

    def _start_clock(self, now: float) -> None:
        """From now on (`perf_counter`), count `max_time` and `requeue_after`, and let signals preempt the run."""
        self.preemptible = True
        self.requeue_at = now + seconds_of(self.settings.requeue_after, "engine.requeue_after")
        self.deadline = min(now + seconds_of(self.settings.max_time), self.requeue_at)

    def _end_by_time(self) -> None:
        """Ask for what `requeue_after` or `max_time` says, whichever comes first."""
        if self.deadline == self.requeue_at:
            self._requests.preempt(self.settings.requeue)
        else:
            self._requests.stop(self.settings.out_of_time)

    def _call(self, calls: Sequence[Call], *args: Any) -> None:
        for call in calls:
            call(self, *args)
