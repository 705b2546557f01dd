"""EMAHook: an average of the weights, for validation, test and publishing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hydraloop.engine.hook import Hook, Priority
from hydraloop.engine.interval import Every
from hydraloop.errors import UserError
from hydraloop.hooks.ema.averaging import DEFAULT_WARM_UP, Averaged, weighting

if TYPE_CHECKING:
    from torch import Tensor

    from hydraloop.engine.engine import Engine


class EMAHook(Hook):
    """Averages the weights over optimizer steps and evaluates on the average; training itself does not notice.

    The first update copies the weights, each further one moves the average towards them by a weight that `ema_type`
    gives (`averaging.py` has the formulas and their sources). Before the first update, and with `weights=raw`,
    validation and test run on the raw weights; after it on the average, put into the model in place (parameters keep
    their identity) and taken out again whatever happens. An fp16 step that was skipped is no step and no update.

    Mount points: before_run, before_train, before_train_epoch, after_train_iter, after_train_epoch, before_val_epoch,
    before_test_epoch, before_save_checkpoint. Priority NORMAL, MMEngine's: before `checkpoint`, which saves the average
    of the same step. No host sync; an update is one foreach kernel over all parameters, and needs memory for one more
    model (two during evaluation). State: the averages, the number of updates, and the first step of `begin_epoch`.
    Defaults are mmengine's but for `warmup`.

    Args:
        ema_type: `exponential`, `stochastic`, `momentum_annealing`, `exp_momentum` or `linear_momentum`.
        momentum: the share of the new weights in an update, in (0, 1).
        warmup: a larger share at first, max(momentum, 9 / (10 + updates)); of `exponential` only.
        interval: optimizer steps (epochs with `by_epoch`) between two updates, at least 1. Without a begin, the first
            update is at step `interval`, by the rule of all intervals here; mmengine copies at step 1.
        by_epoch: update at the end of epochs.
        begin_epoch: the epoch (from 1) whose first optimizer step has the first update (with `by_epoch`, whose end);
            0 and 1: no begin.
        begin_iter: the optimizer step (from 1) that has the first update; 0 and 1: no begin.
        update_buffers: average the buffers too (the statistics of normalisation layers), and copy integer ones;
            False: the averaged model uses the raw model's. Of several ranks rank 0's average counts; with
            `sync_norm` or `sync_buffers` the mean of all ranks' averages, in whatever order the hooks come.
        gamma: how slowly `momentum_annealing` and `exp_momentum` reach `momentum`, in optimizer steps; None: 100 and
            2000. Of these two only.
        warm_up: the same of `linear_momentum`, of that only.

    Raises:
        UserError: an option is out of range or of another `ema_type`, two of them contradict each other, or (before
            the first iteration, as in mmengine) training would end before the first update.
    """

    priority = Priority.NORMAL
    collective = True  # all ranks gather their shards for it

    def __init__(
        self,
        *,
        ema_type: str = "exponential",
        momentum: float = 0.0002,
        warmup: bool = True,
        interval: int = 1,
        by_epoch: bool = False,
        begin_epoch: int = 0,
        begin_iter: int = 0,
        update_buffers: bool = False,
        gamma: float | None = None,
        warm_up: int = DEFAULT_WARM_UP,
    ) -> None:
        if interval < 1:
            raise UserError(f"{interval} is below 1", key="interval", remedy="Use 1 to average every step.")
        if begin_epoch < 0 or begin_iter < 0:
            key = "begin_epoch" if begin_epoch < 0 else "begin_iter"
            raise UserError("a begin cannot be negative", key=key, remedy="Use 0 to begin at the start.")
        if begin_iter and (begin_epoch or by_epoch):
            raise UserError(
                "begin_iter counts optimizer steps, and the begin is given in epochs",
                key="begin_iter",
                remedy="Use begin_epoch alone, or begin_iter alone with by_epoch=false.",
            )
        self.update_buffers = update_buffers
        self.updates = 0
        """Updates done, the first copy included."""
        self._weight = weighting(
            ema_type, momentum=momentum, warmup=warmup, gamma=gamma, warm_up=warm_up, interval=interval
        )
        self._by_epoch = by_epoch
        self.idle_points = ("after_train_iter",) if by_epoch else ("after_train_epoch",)
        self._every = Every(interval, begin_epoch if by_epoch else begin_iter)
        self._begin_epoch = begin_epoch
        self._begins_in_epoch = begin_epoch > 1 and not by_epoch
        self._begin: int | None = None  # the first optimizer step of `begin_epoch`, known once that has begun
        self._strict = True
        self._averaged: Averaged | None = None

    # The run. ------------------------------------------------------------------------------------------------------

    def before_run(self, engine: Engine) -> None:
        """Find the model's tensors, of which a checkpoint may bring averages."""
        if self._averaged is None:  # an engine that is used again keeps what it has averaged
            self._averaged = Averaged(engine.model, buffers=self.update_buffers)
        self._strict = engine.settings.resume_strict

    def before_train(self, engine: Engine) -> None:
        """Refuse options with which there would be no average.

        Raises:
            UserError: training ends before the first update.
        """
        if engine.progress.iteration or not engine.max_iters:  # a run that goes on was checked when it began
            return
        every = self._every
        last = engine.max_iters // engine.epoch_length if self._by_epoch else _steps(engine, engine.max_iters)
        if self._begins_in_epoch:
            every = Every(every.interval, _steps(engine, (self._begin_epoch - 1) * engine.epoch_length) + 1)
        if not every.due(last, done=0):
            option = "begin_epoch" if self._begin_epoch else "begin_iter" if self._every.begin else "interval"
            unit = "epochs" if self._by_epoch else "optimizer steps"
            raise UserError(
                f"training ends, after {last} {unit}, before the first update of the average",
                key=f"{self.key}.{option}",
                remedy="Lower it, train for longer, or leave the hook out.",
            )

    def before_train_epoch(self, engine: Engine) -> None:
        """Follow storages that something replaced between epochs; begin in `begin_epoch`."""
        self._of_model.rebind()
        if self._begins_in_epoch and self._begin is None and engine.progress.epoch + 1 >= self._begin_epoch:
            self._begin_at(engine.progress.optimizer_step + 1)

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """Update, if the optimizer stepped and an update is due."""
        if not engine.stepped:
            return
        progress = engine.progress
        if self._every.due(progress.optimizer_step) and progress.epoch + 1 >= self._begin_epoch:
            self._update()

    def after_train_epoch(self, engine: Engine) -> None:
        """Update, if one is due: with `by_epoch` only."""
        if self._every.due(engine.progress.epoch):
            self._update()

    def before_val_epoch(self, engine: Engine) -> None:
        """Validate on the average."""
        engine.during_evaluation(self._swapped(engine))

    def before_test_epoch(self, engine: Engine) -> None:
        """Test on the average; the weights of a checkpoint file are evaluated as they are."""
        engine.during_evaluation(self._swapped(engine))

    def before_save_checkpoint(self, engine: Engine, checkpoint: dict[str, Any]) -> None:
        """Say that the averaged weights are in this hook's state."""
        if self.updates:
            checkpoint["meta"]["averaged_weights"] = self.name

    def average_of(self, tensor: Tensor) -> Tensor | None:
        """The average of a tensor of the model, to be changed in place; None where there is none (yet).

        By this `sync_norm` and `sync_buffers` find what to average over the ranks.
        """
        return None if self._averaged is None else self._averaged.average_of(tensor)

    # State. --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """`averaged`: the averages by state-dict key of the model; `updates`: how many went into them; `begin`: the
        first optimizer step of `begin_epoch`, None if that has not begun."""
        averaged = {} if self._averaged is None else self._averaged.state_dict()
        return {"averaged": averaged, "updates": self.updates, "begin": self._begin}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the averages of a checkpoint; the model has its raw weights already.

        Raises:
            UserError: an average is missing or unknown, unless `resume_strict=false`.
        """
        self.updates = state["updates"]
        begin = state.get("begin")  # older checkpoints do not have it
        if self._begins_in_epoch and begin is not None:
            self._begin_at(begin)
        if self.updates:
            self._of_model.load_state_dict(state["averaged"], strict=self._strict, key=self.key)

    # Within. -------------------------------------------------------------------------------------------------------

    @property
    def _of_model(self) -> Averaged:
        assert self._averaged is not None, "made in before_run"
        return self._averaged

    def _begin_at(self, step: int) -> None:
        self._begin = step
        self._every = Every(self._every.interval, step)

    def _update(self) -> None:
        averaged = self._of_model
        if self.updates:
            averaged.update(self._weight(self.updates))
        else:
            averaged.start()
        self.updates += 1

    @contextmanager
    def _swapped(self, engine: Engine) -> Iterator[None]:
        if not self.updates or engine.evaluating_checkpoint is not None or engine.settings.weights == "raw":
            yield
            return
        with self._of_model.swapped_in():
            yield


def _steps(engine: Engine, iterations: int) -> int:
    """Optimizer steps in so many iterations from the start; an epoch's last accumulation window may be a short one."""
    epochs, rest = divmod(iterations, engine.epoch_length)
    return epochs * -(-engine.epoch_length // engine.accumulate) + -(-rest // engine.accumulate)
