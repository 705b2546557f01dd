"""FreezeHook: trains without some modules, for a number of epochs or iterations or for the whole run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import nn

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook, Priority
from hydraloop.engine.parameter_patterns import matching
from hydraloop.errors import UserError
from hydraloop.schemas.option_checks import check_at_least

log = logging.getLogger(__name__)


class FreezeHook(Hook):
    """Freezes modules of the model: their parameters get no gradients, and their batch norms keep their statistics.

    The optimizer holds frozen parameters from the start, but neither steps nor decays them. After `epochs` or `iters`
    they train as if they had been there before: momentum and other moments start at zero, and the learning rate is that
    of the schedule. Normalisation layers with running statistics are in eval mode while they are frozen, unless
    `norm_eval` is off. Dropout stays on.

    With DDP, the task is wrapped again at each change, because DDP averages only gradients of parameters that required
    them when it wrapped the task. With `accumulate`, `iters` ends with the accumulation window. Two hooks must freeze
    separate modules: of two with the same one, the first end counts.

    Priority HIGH, before hooks that look at what is trained. Cost: one comparison in each iteration with `iters`; no
    host sync. No state: the progress decides, so a resumed run has the same modules frozen. Options: `FreezeHookConf`.

    Raises:
        UserError: a number is out of range, or `epochs` and `iters` are both set. Before the first iteration: a pattern
            matches no module, or they match no trained parameter, or all of them.
    """

    priority = Priority.HIGH
    collective = True

    def __init__(
        self,
        *,
        modules: Sequence[str] | None = None,
        epochs: int | None = None,
        iters: int | None = None,
        norm_eval: bool = True,
    ) -> None:
        check_at_least(1, epochs=epochs, iters=iters)
        if epochs is not None and iters is not None:
            raise UserError("epochs and iters are both set", key="epochs", remedy="Set one of them to null.")
        self.modules, self.epochs, self.iters, self.norm_eval = modules or (), epochs, iters, norm_eval
        self._parameters: list[nn.Parameter] = []
        self._norms: list[nn.Module] = []
        self._frozen = False
        unused = {"before_train_epoch": epochs, "before_train_iter": iters}
        self.idle_points = {point for point, end in unused.items() if end is None}

    def at_position(self, engine: Engine) -> None:
        """Freeze the modules, unless their frozen time is over."""
        if not self._parameters:  # once, because later they are not the trained ones
            self._parameters, self._norms = self._chosen(engine)
        progress = engine.progress
        done, end = (progress.epoch, self.epochs) if self.iters is None else (progress.iteration, self.iters)
        frozen = end is None or done < end
        if frozen == self._frozen:
            return
        self._frozen = frozen
        for parameter in self._parameters:
            parameter.requires_grad_(not frozen)
        for module in self._norms:
            module.train(not frozen)
        engine.stepper.rewrap()
        log.info(
            "%s: %s %d parameters and the statistics of %d layers at iteration %d",
            self.key, "froze" if frozen else "unfroze", len(self._parameters), len(self._norms),
            engine.progress.iteration,
        )  # fmt: skip

    def before_train_epoch(self, engine: Engine) -> None:
        """Unfreeze after `epochs`."""
        self.at_position(engine)

    def before_train_iter(self, engine: Engine, batch_idx: int, batch: Any) -> None:
        """Unfreeze after `iters`, between two accumulation windows."""
        if engine.stepper.window_closed:
            self.at_position(engine)

    def _chosen(self, engine: Engine) -> tuple[list[nn.Parameter], list[nn.Module]]:
        """Return the parameters to freeze, and the normalisation layers to put into eval mode."""
        key, model = f"{self.key}.modules", engine.model
        if not self.modules:
            raise UserError("no module is named", key=key, remedy=f"Name some: {key}=[backbone] or '{key}=[layers.*]'.")
        parts: dict[str, nn.Parameter | nn.Module] = {
            **{name: module for name, module in model.named_modules(remove_duplicate=False) if name},
            **dict(model.named_parameters(remove_duplicate=False)),  # a tied parameter has several names
        }
        covered = {parts[name] for name in matching(self.modules, parts, key)}
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        parameters = [parameter for parameter in trained if parameter in covered]
        if len(parameters) in (0, len(trained)):
            which = "all" if parameters else "none"
            raise UserError(
                f"{which} of the {len(trained)} trained parameters are in these modules",
                key=key,
                remedy=f"Name other modules, such as {next((name for name, _ in model.named_children()), '')}.",
            )
        layers = [part for part in covered if getattr(part, "running_mean", None) is not None]
        norms = [part for part in layers if isinstance(part, nn.Module) and self.norm_eval and part.training]
        return parameters, norms
