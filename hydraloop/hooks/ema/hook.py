"""EMAHook: an average of the weights, for validation, test and publishing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.interval import Every
from hydraloop.errors import UserError
from hydraloop.hooks.ema.averaging import DEFAULT_WARM_UP, Averaged, weighting
from hydraloop.hooks.ema.formula import Formula
from hydraloop.hooks.shared.option_checks import check_at_least

if TYPE_CHECKING:
    from torch import Tensor


class EMAHook(Hook):
    """Averages the weights over optimizer steps and evaluates on the average; training is unchanged.

    The first update copies the weights. Each further update moves the average towards them, with a weight that depends
    on `ema_type` (`averaging.py` has the formulas and sources), or by a custom formula, `weight` (`formula.py` has its
    forms). Before the first update, and with `weights=raw`, validation and test use the raw weights. After it, the
    average is copied into the model's parameters (which keep their identity) for each evaluation, and the raw weights
    are always restored. A step that fp16 skips is not an update.

    Priority NORMAL, MMEngine's: before `checkpoint`, which saves the average of the same step. Cost: no host sync; an
    update is one foreach kernel over all parameters; memory for one more model, two during evaluation. State: the
    averages, the number of updates, and the first step of `begin_epoch`. Options: `EMAHookConf`. Defaults are
    MMEngine's, except `warmup`.

    Raises:
        UserError: an option is out of range or belongs to another `ema_type`, two options contradict each other, or
            (before the first iteration, as in MMEngine) training would end before the first update.
    """

    collective = True  # all ranks gather the shards

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
        weight: Callable[..., Any] | None = None,
    ) -> None:
        check_at_least(1, interval=interval)
        check_at_least(0, begin_epoch=begin_epoch, begin_iter=begin_iter)
        if begin_iter and (begin_epoch or by_epoch):
            raise UserError(
                "begin_iter counts optimizer steps and cannot be combined with begin_epoch or by_epoch",
                key="begin_iter",
                remedy="Set only begin_epoch, or only begin_iter with by_epoch=false.",
            )
        self.update_buffers = update_buffers
        self.updates = 0
        """Number of updates, including the first copy."""
        self._weight = weighting(
            ema_type, momentum=momentum, warmup=warmup, gamma=gamma, warm_up=warm_up, interval=interval
        )
        self._formula = None if weight is None else Formula(weight)
        replaced = {
            "ema_type": ema_type != "exponential",
            "momentum": momentum != 0.0002,
            "warmup": not warmup,
            "gamma": gamma is not None,
            "warm_up": warm_up != DEFAULT_WARM_UP,
        }
        if weight is not None and any(replaced.values()):
            also = ", ".join(name for name, is_set in replaced.items() if is_set)
            raise UserError(f"replaces {also}, which is set, too", key="weight", remedy=f"Leave out {also} or weight.")
        self._by_epoch = by_epoch
        self.idle_points = ("after_train_iter",) if by_epoch else ("after_train_epoch",)
        self._every = Every(interval, begin_epoch if by_epoch else begin_iter)
        self._begin_epoch = begin_epoch
        self._begins_in_epoch = begin_epoch > 1 and not by_epoch
        self._begin: int | None = None
        """The first optimizer step of `begin_epoch`; None until that epoch begins."""
        self._strict = True
        self._averaged: Averaged | None = None

    # The run. ------------------------------------------------------------------------------------------------------

    def before_run(self, engine: Engine) -> None:
        """Find the tensors to average; a checkpoint that is loaded next may contain averages."""
        if self._averaged is None:  # an engine that trains again keeps its averages
            self._averaged = Averaged(engine.model, buffers=self.update_buffers)
        self._strict = engine.settings.resume_strict

    def before_train(self, engine: Engine) -> None:
        """Reject options with which there would be no average."""
        if engine.progress.iteration or not engine.max_iters:  # a resumed run was checked at its start
            return
        every = self._every
        last = engine.max_iters // engine.epoch_length if self._by_epoch else _steps(engine, engine.max_iters)
        if self._begins_in_epoch:
            every = Every(every.interval, _steps(engine, (self._begin_epoch - 1) * engine.epoch_length) + 1)
        if not every.due(last, done=0):
            option = "begin_epoch" if self._begin_epoch else "begin_iter" if self._every.begin else "interval"
            unit = "epochs" if self._by_epoch else "optimizer steps"
            raise UserError(
                f"training ends after {last} {unit}, before the first update of the average",
                key=f"{self.key}.{option}",
                remedy="Lower it, train for longer, or leave the hook out.",
            )

    def before_train_epoch(self, engine: Engine) -> None:
        """Find storages that were replaced between epochs; start the interval in `begin_epoch`."""
        self._of_model.rebind()
        if self._begins_in_epoch and self._begin is None and engine.progress.epoch + 1 >= self._begin_epoch:
            self._begin_at(engine.progress.optimizer_step + 1)

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        if not engine.stepped:
            return
        progress = engine.progress
        if self._every.due(progress.optimizer_step) and progress.epoch + 1 >= self._begin_epoch:
            self._update()

    def after_train_epoch(self, engine: Engine) -> None:
        if self._every.due(engine.progress.epoch):
            self._update()

    def before_val_epoch(self, engine: Engine) -> None:
        """Validate on the average."""
        engine.during_evaluation(self._swapped(engine))

    def before_test_epoch(self, engine: Engine) -> None:
        """Test on the average, except for the weights of a checkpoint file."""
        engine.during_evaluation(self._swapped(engine))

    def before_save_checkpoint(self, engine: Engine, checkpoint: dict[str, Any]) -> None:
        """Add to the metadata that this hook's state contains averaged weights."""
        if self.updates:
            checkpoint["meta"]["averaged_weights"] = self.name

    def average_of(self, tensor: Tensor) -> Tensor | None:
        """Return the average of one of the model's tensors, to be changed in place; None before the first update.

        `sync_norm` and `sync_buffers` use it to average over the ranks.
        """
        return None if self._averaged is None else self._averaged.average_of(tensor)

    # State. --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the averages by the model's state-dict keys, the number of updates, and the first optimizer step of
        `begin_epoch` (None before it)."""
        averaged = {} if self._averaged is None else self._averaged.state_dict()
        return {"averaged": averaged, "updates": self.updates, "begin": self._begin}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the averages of a checkpoint; the model already has its raw weights.

        Raises:
            UserError: an average is missing or unknown, unless `resume_strict=false`.
        """
        self.updates = state["updates"]
        if self._begins_in_epoch:
            self._begin_at(state.get("begin"))  # not in older checkpoints
        self._of_model.load_state_dict(state["averaged"], strict=self._strict, key=self.key)

    # Within. -------------------------------------------------------------------------------------------------------

    @property
    def _of_model(self) -> Averaged:
        assert self._averaged is not None, "set in before_run"
        return self._averaged

    def _begin_at(self, step: int | None) -> None:
        self._begin = step
        self._every = Every(self._every.interval, step or 0)

    def _update(self) -> None:
        averaged = self._of_model
        if not self.updates:
            averaged.start()
        elif self._formula is None:
            averaged.update(self._weight(self.updates))
        else:
            self._formula.update(averaged, self.updates, key=f"{self.key}.weight")
        self.updates += 1

    @contextmanager
    def _swapped(self, engine: Engine) -> Iterator[None]:
        if not self.updates or engine.evaluator.tested_checkpoint is not None or engine.settings.weights == "raw":
            yield
            return
        with self._of_model.swapped_in():
            yield


def _steps(engine: Engine, iterations: int) -> int:
    """Return the optimizer steps in the first `iterations`; an epoch's last accumulation window may be short."""
    epochs, rest = divmod(iterations, engine.epoch_length)
    return epochs * -(-engine.epoch_length // engine.accumulate) + -(-rest // engine.accumulate)
