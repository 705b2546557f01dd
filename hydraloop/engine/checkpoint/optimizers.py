"""The optimizers of a run in its checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from hydraloop.engine.checkpoint import optimizer_state
from hydraloop.engine.checkpoint.format import Checkpoint
from hydraloop.engine.checkpoint.optimizer_state import Hyperparameters
from hydraloop.engine.checkpoint.strict_loading import differs
from hydraloop.engine.run import Run
from hydraloop.errors import UserError

log = logging.getLogger(__name__)

_REPEAT = "Repeat optimizer, its match, groups and layer_decay as in the run, start a new run with load_from=…, or set"
_RULES = ("groups", "layer_decay")
"""Options that set the numbers of each group."""

Names = dict[str, list[list[str]]]
"""Of the parameters in each group, by optimizer."""


class SavedOptimizers:
    """Saves the optimizers of a run, and restores each one whose parameter groups are those of the checkpoint.

    Args:
        run: the parts of the run; without an optimizer, there is nothing to save.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        optimizer = run.trained_by
        self.hyperparameters = [] if optimizer is None else optimizer_state.hyperparameters(optimizer)
        """The numbers of each parameter group, before any schedule."""

    def meta(self) -> dict[str, Any]:
        """Return the entries of `meta` about the optimizers (see `format.py`)."""
        kinds = {name: type(one).__name__ for name, one in self._run.optimizers.items()}
        return {
            "optimizer": kinds.get("", kinds),
            "hyperparameters": self.hyperparameters,
            "groups": [{"optimizer": group.optimizer, "names": list(group.names)} for group in self._run.groups],
        }

    def load(self, checkpoint: Checkpoint, *, strict: bool) -> None:
        """Load the states; then replace hyperparameters that were typed for this run.

        Args:
            checkpoint: with the states.
            strict: False: an optimizer starts without a state, with a warning, if its groups have changed.

        Raises:
            UserError: an optimizer has another class, or with `strict` another name or other groups.
        """
        meta, state, here = checkpoint["meta"], checkpoint["optimizer"], self._run.optimizers
        saved: dict[str, Any] = state if isinstance(meta.get("optimizer"), dict) else {"": state}
        fitting = self._fitting(saved, meta, strict)
        given = _split(meta.get("hyperparameters"), {name: len(one["param_groups"]) for name, one in saved.items()})
        config = _split(self.hyperparameters, {name: len(one.param_groups) for name, one in here.items()})
        self.hyperparameters = []
        for name, optimizer in here.items():
            numbers = config[name]
            if name in fitting:
                try:
                    optimizer_state.load(optimizer, saved[name])
                except ValueError as error:
                    raise UserError(f"the optimizer's state does not fit: {error}", key="resume") from error
                numbers = given.get(name) or optimizer_state.hyperparameters(optimizer)
                self._override(name, optimizer, numbers, config[name])
            self.hyperparameters += numbers

    def _fitting(self, saved: Mapping[str, Any], meta: Mapping[str, Any], strict: bool) -> set[str]:
        """Return the names of the optimizers whose saved state fits; for the others, warn, or raise with `strict`."""
        here, kinds = self._run.optimizers, meta.get("optimizer")
        kinds = kinds if isinstance(kinds, dict) else {"": kinds}
        for name, one in here.items():
            # The state of another class may load without an error, and fail in the first step.
            if kinds.get(name) not in (None, type(one).__name__):
                raise UserError(
                    f"the checkpoint has the state of {kinds[name]}, this run uses {type(one).__name__}",
                    key=_key(name),
                    remedy="Use the same optimizer; to change it, start a new run with load_from=…",
                )
        if saved.keys() != here.keys():
            problem = f"the checkpoint has the state of {_listed(saved)}, this run uses {_listed(here)}"
            differs(strict, "optimizer", problem, _REPEAT)
        fitting = here.keys() & saved.keys()
        old = _by_optimizer((group["optimizer"], group["names"]) for group in meta["groups"])
        now = _by_optimizer((group.optimizer, group.names) for group in self._run.groups)
        moved = _moved(old, now)
        if moved is not None:
            differs(strict, "optimizer.groups", moved, _REPEAT)
        fitting = {name for name in fitting if old[name] == now[name]}
        for name in here.keys() - fitting:
            log.warning("%s starts without a state", _key(name))
        return fitting

    def _override(
        self, name: str, optimizer: Optimizer, given: list[Hyperparameters], config: list[Hyperparameters]
    ) -> None:
        """Apply hyperparameters typed on the command line; the others stay as loaded, with a warning if they differ.

        Args:
            name: of the optimizer.
            optimizer: with the loaded state.
            given: those of the checkpoint; changed in place.
            config: those of this run.
        """
        key, prefix = _key(name), f"{name}." if name else ""
        overrides, schedules = self._run.settings.optimizer_overrides, self._run.schedules.items()
        typed = {option.removeprefix(prefix) for option in overrides if option.startswith(prefix)}
        setting = {number: label for label, one in schedules for number in config[0] if one.sets(number, optimizer)}
        changed = typed - set(_RULES)
        if len(changed) < len(typed):  # rules may set any number of any group
            changed |= {
                number for number in config[0] if None not in [group.get(number) for group in (*config, *given)]
            }
        lines = optimizer_state.override(optimizer, given, config, changed - setting.keys(), key)
        kept = optimizer_state.kept(optimizer, given, config, setting.keys(), key)
        if self._run.ranks.is_main:
            for line in lines:
                log.info("%s", line)
            for number in sorted(typed & setting.keys()):
                text = "%s.%s has no effect: scheduler.%s sets it to its own numbers"
                log.warning(text, key, number, setting[number])
            for line in kept:
                log.warning("%s", line)


def _split(values: Sequence[Hyperparameters] | None, lengths: Mapping[str, int]) -> dict[str, list[Hyperparameters]]:
    """Return the part of each optimizer; of an old file, which has none, nothing."""
    rest = list(values or ())
    return {name: [rest.pop(0) for _ in range(min(length, len(rest)))] for name, length in lengths.items()}


def _by_optimizer(groups: Iterable[tuple[str, Sequence[str]]]) -> Names:
    found: Names = {}
    for optimizer, names in groups:
        found.setdefault(optimizer, []).append(list(names))
    return found


def _moved(old: Names, now: Names) -> str | None:
    """Return a sentence about the first parameter that has another place than in the checkpoint; None if none has."""
    before, after = _places(old), _places(now)
    for name in {**after, **before}:
        was, place = before.get(name, _NOWHERE), after.get(name, _NOWHERE)
        if was[:2] != place[:2]:
            return f"{name} was in {_words(was)} in the checkpoint, and is in {_words(place)} now"
    for name, place in after.items():
        if before[name] != place:
            return f"{_words(place)} has its parameters in another order than in the checkpoint, from {name} on"
    return None


Place = tuple[str, int, int]
"""Of a parameter: the optimizer, the group, the position in it."""
_NOWHERE: Place = ("", -1, 0)


def _places(groups: Names) -> dict[str, Place]:
    return {
        name: (optimizer, number, position)
        for optimizer, lists in groups.items()
        for number, names in enumerate(lists)
        for position, name in enumerate(names)
    }


def _words(place: Place) -> str:
    optimizer, number, _ = place
    return "no group" if number < 0 else f"group {number}{f' of optimizer.{optimizer}' if optimizer else ''}"


def _listed(names: Iterable[str]) -> str:
    return "one optimizer" if "" in names else f"the optimizers {', '.join(names)}"


def _key(name: str) -> str:
    return f"optimizer.{name}" if name else "optimizer"
