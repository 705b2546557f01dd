"""RollbackHook: goes back to the last checkpoint when the loss is not finite or jumps."""

from __future__ import annotations

import logging
import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from hydraloop.engine.checkpoint.format import peek
from hydraloop.engine.checkpoint.rollback import Rollback
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.interval import Every
from hydraloop.engine.loaders import Ordered, TrainLoader
from hydraloop.errors import UserError
from hydraloop.hooks.check_invalid_loss import invalid_loss
from hydraloop.hooks.checkpoint.hook import CheckpointHook
from hydraloop.hooks.shared.kept_losses import KeptLoss, loss_in_backward, means_of
from hydraloop.option_checks import check_above, check_at_least, check_choice
from hydraloop.run_files.checkpoint_files import candidates
from hydraloop.run_files.integrity import damage

log = logging.getLogger(__name__)

_KINDS = ("nan", "spike")


class RollbackHook(Hook):
    """Goes back to the last checkpoint when the loss is not finite or jumps, and leaves out the batch that caused it.

    The hook checks all losses since the previous check every `interval` iterations, at the end of training, and before
    a validation or a checkpoint. So no checkpoint has weights from after a bad loss. At the first bad loss, all ranks
    restore the newest undamaged checkpoint from before it: model, optimizers, schedules, hooks, random generators and
    position. Then training continues. The batches of the optimizer step with the bad loss are loaded, but not trained
    on: the run ends with the result of a run without them, to the last bit. They do not count as iterations. The loss
    is the mean of all ranks; in a task with steps, each step has its own median.

    Records after the checkpoint are moved, as in a resumed run. With a tracker, they stay: the tracker has them. Hooks
    of other frameworks keep what is not in their `state_dict`.

    Priority NORMAL, before the logger. Cost: one host sync per check, and with several ranks one exchange between the
    hosts. State: the last losses, what is left out, the number of rollbacks. Options: `RollbackHookConf`.

    Raises:
        UserError: an option is out of range.
    """

    collective = True

    def __init__(
        self,
        *,
        on: Sequence[str] | None = None,
        factor: float = 3.0,
        window: int = 50,
        max_rollbacks: int = 3,
        skip_samples: bool = True,
        interval: int = 10,
    ) -> None:
        self.on = _KINDS if on is None else tuple(on)
        if not self.on:
            raise UserError("there is nothing to go back at", key="on", remedy="Use [nan], [spike] or null, both.")
        for kind in self.on:
            check_choice(_KINDS, on=kind)
        check_at_least(1, max_rollbacks=max_rollbacks, interval=interval)
        check_at_least(2, window=window)
        check_above(1, factor=factor)
        self.factor, self.window, self.max_rollbacks = factor, window, max_rollbacks
        self.skip_samples = skip_samples
        self.checks_loss = "nan" in self.on  # then `check_invalid_loss` leaves them to this hook
        self._due = Every(interval).due
        self._wanted = self._training = False
        self._kept: list[KeptLoss] = []
        self._good = self._losses({})
        self._left_out: dict[int, set[int]] = {}
        self._rollbacks = 0

    def after_load_checkpoint(self, engine: Engine, checkpoint: dict[str, Any]) -> None:
        """Leave out the batches of earlier rollbacks."""
        self._kept = []
        engine.progress.leave_out(self._left_out)

    def before_train(self, engine: Engine) -> None:
        """Check that batches can be left out, and forget the losses of an earlier training of this engine.

        Raises:
            UserError: the data is a stream, and `skip_samples` is true.
        """
        loader: object = engine.loaders.train
        if self.skip_samples and isinstance(loader, TrainLoader) and not isinstance(loader, Ordered):
            raise UserError(
                "batches of a stream cannot be left out: the next ones take their place",
                key=f"{self.key}.skip_samples",
                remedy=f"Set {self.key}.skip_samples=false.",
            )
        self._kept, self._wanted, self._training = [], False, True

    def after_backward(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """Keep the loss."""
        self._kept.append(loss_in_backward(engine, batch_idx, outputs))

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """Check the kept losses every `interval` iterations, between two accumulation windows.

        Raises:
            Rollback: one is bad; the engine goes back.
            InvalidLossError: one is bad, and there is nothing to go back to, or it has happened too often.
        """
        iteration = engine.progress.iteration
        last = iteration == engine.max_iters or engine.requests.preempted_by is not None
        self._wanted = self._wanted or self._due(iteration, last=last)
        if self._wanted and engine.stepper.window_closed:
            self._check(engine)

    def before_val(self, engine: Engine) -> None:
        """Check the kept losses before a validation, whose metrics may stop the run or lower its learning rate.

        Raises:
            Rollback: one is bad; the engine goes back.
            InvalidLossError: as in after_train_iter.
        """
        self._check(engine)

    def before_save_checkpoint(self, engine: Engine, checkpoint: dict[str, Any]) -> None:
        """Check the kept losses before the checkpoint is written.

        Raises:
            Rollback: one is bad; nothing is written, and the engine goes back.
            InvalidLossError: as in after_train_iter, or after training that was not preempted.
        """
        self._check(engine)
        checkpoint["hooks"][self.name] = self.state_dict()

    def after_train(self, engine: Engine) -> None:
        """Check the kept losses of a run that has stopped; of a preempted one, its last save checks them.

        Raises:
            InvalidLossError: one is bad.
        """
        self._training = False
        if engine.error is None and engine.requests.preempted_by is None:
            self._check(engine)

    def state_dict(self) -> dict[str, Any]:
        """Return the last losses, the batches that are left out, and the number of rollbacks."""
        return {
            "losses": {step: list(losses) for step, losses in self._good.items()},
            "left_out": {epoch: sorted(batches) for epoch, batches in self._left_out.items()},
            "rollbacks": self._rollbacks,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the losses of a checkpoint. Later rollbacks of this process remain."""
        self._good = self._losses(state["losses"])
        for epoch, batches in state["left_out"].items():
            self._left_out.setdefault(epoch, set()).update(batches)
        self._rollbacks = max(self._rollbacks, state["rollbacks"])

    # Within. -------------------------------------------------------------------------------------------------------

    def _losses(self, saved: Mapping[str, Sequence[float]]) -> defaultdict[str, deque[float]]:
        """Return the last good losses by step."""
        found: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=self.window))
        for step, losses in saved.items():
            found[step].extend(losses)
        return found

    def _check(self, engine: Engine) -> None:
        kept, self._kept, self._wanted = self._kept, [], False
        if not kept:
            return
        for one, loss in zip(kept, means_of(kept, engine.distributed), strict=True):
            problem = self._problem(loss, self._good[one.step])
            if problem is not None:
                self._go_back(engine, one, f"{loss:.4g} at iteration {one.iteration}{problem}")
            if math.isfinite(loss):
                self._good[one.step].append(loss)

    def _problem(self, loss: float, good: deque[float]) -> str | None:
        """Return why a loss is bad; None if it is good."""
        if not math.isfinite(loss):
            return "" if "nan" in self.on else None
        if "spike" not in self.on or len(good) < self.window / 2:
            return None
        middle = median(good)
        return f", {loss / middle:.4g} times the median" if loss > self.factor * middle > 0 else None

    def _go_back(self, engine: Engine, bad: KeptLoss, problem: str) -> None:
        """Raise `Rollback`, or `InvalidLossError` if the run cannot go back."""
        engine.checkpoints.settle()
        start = bad.batch_idx // engine.accumulate * engine.accumulate
        batches = range(start, min(start + engine.accumulate, engine.epoch_length))
        checkpoint = self._newest_before(engine, bad.iteration - (bad.batch_idx - start))
        obstacle = self._obstacle(engine, checkpoint)
        if checkpoint is None or obstacle is not None:
            engine.loss_check.end_diverged()
            raise invalid_loss(engine, bad, f"the loss is {problem}, and {obstacle}", norms={}, key=self.key)
        self._rollbacks += 1
        left_out = ""
        if self.skip_samples:
            self._left_out.setdefault(bad.epoch, set()).update(batches)
            which = f"batch {start}" if engine.accumulate == 1 else f"batches {start} to {batches[-1]}"
            left_out = f", and {which} (from 0) of epoch {bad.epoch + 1} left out"
        if engine.distributed.is_main:
            count = f"rollback {self._rollbacks} of {self.max_rollbacks}"
            log.warning("the loss is %s: back to %s%s (%s)", problem, checkpoint, left_out, count)
        raise Rollback(checkpoint)

    def _obstacle(self, engine: Engine, checkpoint: Path | None) -> str | None:
        """Return why the run cannot go back to the checkpoint; None if it can."""
        if not self._training and engine.requests.preempted_by is None:
            return "training has ended"
        if self._rollbacks >= self.max_rollbacks:
            return f"the run has gone back {self._rollbacks} times already (max_rollbacks)"
        if checkpoint is None:
            return (
                "no checkpoint is from before it; write them more often: default_hooks.checkpoint.by_epoch=false "
                "default_hooks.checkpoint.interval=100"
            )
        return None

    def _newest_before(self, engine: Engine, iteration: int) -> Path | None:
        """Return the newest undamaged checkpoint from before an iteration (from 1), the same on every rank."""
        found: Path | None = None
        if engine.distributed.is_main:
            hooks = [hook for hook in engine.hooks.values() if isinstance(hook, CheckpointHook)]
            files = candidates(*(hook.folder.path for hook in hooks))
            if engine.checkpoints.resumed_from is not None and engine.checkpoints.resumed_from not in files:
                files.append(engine.checkpoints.resumed_from)
            found = next((path for path in files if self._is_from_before(path, iteration)), None)
        told = engine.distributed.from_main(None if found is None else str(found))
        return None if told is None else Path(told)

    def _is_from_before(self, path: Path, iteration: int) -> bool:
        position = peek(path, key=self.key) if damage(path) is None else None
        return position is not None and position.progress.iteration < iteration
