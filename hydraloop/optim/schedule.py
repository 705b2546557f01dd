"""Schedule: one torch scheduler, what it changes, and when it steps."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, CyclicLR, LRScheduler, OneCycleLR

from hydraloop.errors import UserError, suggestion
from hydraloop.optim import overlap
from hydraloop.optim.horizon import HORIZONS, lengths_of
from hydraloop.optim.shadow import Place, Shadow, places, read, write

log = logging.getLogger(__name__)


class Schedule:
    """One of torch's schedulers (or one like it), stepped between `begin` and `end`.

    Counted in optimizer steps, or in epochs with `by_epoch`. With n of them done, the n+1-th uses the scheduler's value
    at n - begin. Until `begin` the scheduler does nothing, and what it starts from is what the optimizer has by then;
    the value at `end` stays. So `begin: 100` of one and `end: 100` of another join without a gap; schedules that
    overlap multiply, as torch's do when they are chained; only one that adds (a cosine with an `eta_min` above 0) has
    values that depend on the way there, and a resumed run with another length says that it takes the product.

    Several schedules step in the order of the config.

    Args:
        name: its key in the config.
        factory: makes the scheduler, given the optimizer.
        optimizer: whose groups it changes.
        param: which key of the groups: `lr`; `momentum` (the first of the betas where there are betas); `betas`, all
            of them, or one, `betas.0`; `weight_decay` or any other number.
        by_epoch: count epochs; False: optimizer steps.
        begin: the first n at which it acts.
        end: the last n at which it acts; None: the end of training.
        monitor: the validation metric it follows (`ReduceLROnPlateau`); None for the others. A `mode` that is null or
            not given waits for `settle_mode`.

    Raises:
        UserError: the groups have no `param`.
    """

    def __init__(
        self,
        name: str,
        factory: functools.partial[Any],
        optimizer: Optimizer,
        *,
        param: str = "lr",
        by_epoch: bool = False,
        begin: int = 0,
        end: int | None = None,
        monitor: str | None = None,
    ) -> None:
        self.name = name
        self.mode: str | None = factory.keywords.get("mode")
        """Of a schedule with `monitor`: what the config says."""
        if monitor is not None and self.mode is None:
            factory = functools.partial(factory, mode="min")
        self.factory = factory
        self.optimizer = optimizer
        self.by_epoch = by_epoch
        self.begin = begin
        self.end = end
        self.monitor = monitor
        self.scheduler: LRScheduler | None = None
        """None until `begin`."""
        self.where: list[Place] = places(optimizer, param, f"{self.key}.param")
        self._is_lr = param == "lr"
        self._shadow: Shadow | None = None
        self._done = 0
        """The last n."""
        self._product = [1.0] * len(self.where)
        """What a schedule with `monitor` has multiplied each value by, which its state does not say."""
        self.moved = False
        """Whether this run has another length than the one it goes on from."""
        self.beside: tuple[Schedule, ...] = (self,)
        """All schedules of the optimizer, this one included; `overlap.introduce` says who they are."""
        if begin == 0:
            self._make()
        else:
            # Made once for nothing: a wrong argument is an error now and not in the middle of the training.
            with _groups_kept(optimizer):
                self._make()
            self.scheduler = self._shadow = None

    @property
    def key(self) -> str:
        """Its place in the config."""
        return f"scheduler.{self.name}"

    def check_monitor(self, metric_names: tuple[str, ...]) -> None:
        """Refuse a `monitor` that no validation reports.

        Raises:
            UserError: names the close ones, or all.
        """
        if self.monitor is not None and self.monitor not in metric_names:
            raise UserError(
                f"there is no metric {self.monitor!r}",
                key=f"{self.key}.monitor",
                remedy=suggestion(self.monitor, metric_names),
            )

    def settle_mode(self, higher: bool | None) -> None:
        """Follow the `monitor` in its own direction, unless the config has a `mode`. Before the first step.

        Args:
            higher: whether its high values are good; None: nothing says it.

        Raises:
            UserError: nothing says it, and the config does not either.
        """
        own = None if higher is None else "max" if higher else "min"
        if self.mode is None and own is None:
            raise UserError(
                f"nothing says whether high or low values of {self.monitor!r} are good",
                key=f"{self.key}.mode",
                remedy=f"Set {self.key}.mode=max or {self.key}.mode=min.",
            )
        if self.mode is not None and own not in (None, self.mode):
            good, bad = ("high", "rises") if higher else ("low", "falls")
            log.warning("%s.mode=%s, but %s values of %s are good: it acts while that %s; null takes the metric's own",
                        self.key, self.mode, good, self.monitor, bad)  # fmt: skip
        if self.mode is None and own != self.factory.keywords["mode"]:
            self.factory = functools.partial(self.factory, mode=own)
            if self.scheduler is not None:
                self._make()

    def step(self, n: int, metrics: Mapping[str, float] | None = None) -> None:
        """The n-th optimizer step (or epoch, with `by_epoch`) is done: step if that is due. No host sync.

        Args:
            n: counts from 1, each number once.
            metrics: of the validation just done. A schedule with `monitor` steps when it gets them, not otherwise;
                the others do not look at them.

        Raises:
            UserError: the metrics have no `monitor`.
        """
        self._done = n
        if n < self.begin or (self.end is not None and n > self.end):
            return
        if self.scheduler is None:
            self._make()
            if self.monitor is None:
                return
        if self.monitor is None:
            self._step()
        elif metrics is not None:
            self.check_monitor(tuple(metrics))
            with overlap.counted(self.optimizer, self.where, self._product):
                self._step(metrics[self.monitor])

    def _step(self, *arguments: float) -> None:
        scheduler: Any = self.scheduler
        if self._shadow is not None:
            self._shadow.pull()
        scheduler.step(*arguments)
        if self._shadow is not None:
            self._shadow.push()

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's own state (numbers, strings, lists), None before `begin`, and the `values` it has led to."""
        values = [read(self.optimizer, place) for place in self.where]
        return {
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "values": [value.clone() if isinstance(value, Tensor) else value for value in values],
            "done": self._done,
            "product": list(self._product),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned; the optimizer's groups keep their values, which it saves itself.

        Raises:
            UserError: nobody knows what the scheduler would have made of a value that was typed for the resumed run.
        """
        self._done = state.get("done", 0)
        self._product = list(state.get("product", self._product))
        self.moved = False
        if state["scheduler"] is None:
            self.scheduler = self._shadow = None
            return
        with _groups_kept(self.optimizer):
            self._make()
        scheduler: Any = self.scheduler
        of_this_run = dict(vars(scheduler))
        scheduler.load_state_dict(state["scheduler"])
        if "base_lrs" in state["scheduler"] and not isinstance(scheduler, OneCycleLR | CyclicLR):  # their own numbers
            self._take_over_bases()
        self._keep_lengths(of_this_run, counted="done" in state)
        overlap.rebuild(self, state.get("values", ()))

    def factors(self) -> dict[Place, float] | None:
        """What it multiplies each value by, where it stands; None: nobody knows."""
        if self.scheduler is None or self.monitor is not None:
            return dict(zip(self.where, self._product, strict=True))
        values = _closed_form(self.scheduler)
        if values is None:
            return None
        pairs = zip(self.where, values, self.scheduler.base_lrs, strict=True)
        return {place: float(value) / float(base) if base else 1.0 for place, value, base in pairs}

    def changes(self, name: str) -> bool:
        """Whether it changes this entry (`lr`) of the optimizer's parameter groups."""
        return any(place.name == name for place in self.where)

    def sets(self, name: str) -> bool:
        """Whether it sets this entry of the groups to numbers of its own, whatever the optimizer was given."""
        cycles = self.factory.func in (OneCycleLR, CyclicLR)
        return cycles and (self.changes(name) or (self._is_lr and name in ("momentum", "betas")))

    def take_over_values(self, state: dict[str, Any]) -> None:
        """Bring the values of a state to the groups: for a checkpoint that has no state of the optimizer."""
        for place, value in zip(self.where, state.get("values", ()), strict=False):
            write(self.optimizer, place, value)
        for place, base in zip(self.where, (state["scheduler"] or {}).get("base_lrs", ()), strict=False):
            self.optimizer.param_groups[place.group][place.initial] = base

    def _make(self) -> None:
        if self._is_lr:
            self.scheduler = self.factory(self.optimizer)
        else:
            shadow = Shadow(self.optimizer, self.where)
            self.scheduler = self.factory(shadow)
            shadow.push()
            self._shadow = shadow

    def _take_over_bases(self) -> None:
        """Begin with what the groups say: a value that was typed when the run was resumed has replaced it there.

        The groups' values were scaled by new / old then, and what the scheduler adds (`eta_min`) does not scale.

        Raises:
            UserError: nobody knows what the scheduler would have made of the new value.
        """
        scheduler: Any = self.scheduler
        old, values = list(scheduler.base_lrs), _value_alone(scheduler)
        new = [
            self.optimizer.param_groups[place.group].get(place.initial, base)
            for place, base in zip(self.where, old, strict=True)
        ]
        scheduler.base_lrs = new
        if all(float(base) == float(was) for base, was in zip(new, old, strict=True)):
            return
        if values is None and getattr(scheduler, "eta_min", None):
            raise UserError(
                f"{type(scheduler).__name__} in {self.key} has an eta_min, and what it makes of another value is not "
                "known",
                key=f"optimizer.{self.where[0].name}",
                remedy="Leave it out, or start a new run with load_from=…",
            )
        if values is not None:
            scaled = [v * (base / was) if was else base for v, base, was in zip(values, new, old, strict=True)]
            self._follow(scaled, _value_alone(scheduler))

    def _keep_lengths(self, of_this_run: dict[str, Any], *, counted: bool) -> None:
        """The lengths stay what this run's config says: a longer run goes on along its own, longer schedule.

        Args:
            of_this_run: the scheduler's attributes before it took over the state of the other run.
            counted: whether the state says how many steps or epochs were done.
        """
        scheduler: Any = self.scheduler
        known = lengths_of(type(scheduler))
        lengths = {*HORIZONS, *(known or ())} - {"T_0"}  # of the restarts to come it says nothing
        given = self.factory.keywords.keys() & lengths & of_this_run.keys()
        changed = [name for name in sorted(given) if getattr(scheduler, name, None) != of_this_run[name]]
        stands_at = (self._done if self.end is None else min(self._done, self.end)) - self.begin
        moved = counted and known is not None and 0 <= stands_at != scheduler.last_epoch
        if not changed and not moved:
            return
        self.moved = True
        before = [read(self.optimizer, place) for place in self.where]
        old = _closed_form(scheduler)
        if moved and old is not None:  # the other run's begin or end was another
            scheduler.last_epoch = stands_at
        for name in (*changed, "_schedule_phases"):  # OneCycleLR's, which come from its length
            if name in of_this_run:
                setattr(scheduler, name, of_this_run[name])
        self._follow(old, _closed_form(scheduler))
        after = [read(self.optimizer, place) for place in self.where]
        words = ", ".join(f"{name}={self.factory.keywords[name]}" for name in changed)
        words = words or f"begin={self.begin}, end={self.end}"
        log.warning("%s: this run has %s, the one it goes on from had another length: %s %s, was %s",
                    self.key, words, self.where[0].name, after, before)  # fmt: skip

    def _follow(self, old: list[Any] | None, new: list[Any] | None) -> None:
        """Move the values from what the scheduler has made of them to what it makes now: the recursive form would not.

        What other schedules of the same key have made of the values is kept; of a 0 by `overlap.rebuild`, which comes
        after this.
        """
        if old is None or new is None:
            return
        scheduler: Any = self.scheduler
        if self._shadow is not None:
            self._shadow.pull()
        adds = False
        for group, was, value in zip(scheduler.optimizer.param_groups, old, new, strict=True):
            alone = abs(float(group["lr"]) - float(was)) <= 1e-9 * abs(float(was))
            adds |= not alone and bool(getattr(scheduler, "eta_min", 0))
            moved = value if alone else group["lr"] * (value / was if was else 1.0)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(moved)
            else:
                group["lr"] = moved
        if adds:
            log.warning("%s: its eta_min is above 0 and another schedule overlaps it: with another length or another "
                        "%s the product of the two is taken, which is not quite what a whole run has",
                        self.key, self.where[0].name)  # fmt: skip
        # What get_last_lr() returns; torch has no function that sets it.
        scheduler._last_lr = [
            group["lr"].clone() if isinstance(group["lr"], Tensor) else group["lr"]
            for group in scheduler.optimizer.param_groups
        ]
        if self._shadow is not None:
            self._shadow.push()


def _closed_form(scheduler: Any) -> list[Any] | None:
    """The values where it stands, from nothing but its arguments; None: it has no such form."""
    if isinstance(scheduler, OneCycleLR):
        if scheduler.last_epoch > scheduler.total_steps:
            return None
        scheduler._get_lr_called_within_step = True  # else it warns; it has no form but this one
        try:
            return list(scheduler.get_lr())
        finally:
            scheduler._get_lr_called_within_step = False
    closed_form = getattr(scheduler, "_get_closed_form_lr", None)
    return None if closed_form is None else list(closed_form())


def _value_alone(scheduler: Any) -> list[Any] | None:
    """The same; also where the form counts from the last restart, which a change of `last_epoch` does not move."""
    if isinstance(scheduler, CosineAnnealingWarmRestarts):
        base, share = scheduler.base_lrs, (1 + math.cos(math.pi * scheduler.T_cur / scheduler.T_i)) / 2
        return [scheduler.eta_min + (lr - scheduler.eta_min) * share for lr in base]
    return _closed_form(scheduler)


@contextmanager
def _groups_kept(optimizer: Optimizer) -> Iterator[None]:
    """Undo what a scheduler's constructor writes into the optimizer's groups (lr, initial_lr, momentum, ...)."""
    before = [_copied(group) for group in optimizer.param_groups]
    try:
        yield
    finally:
        for group, old in zip(optimizer.param_groups, before, strict=True):
            group.clear()
            group.update(old)


def _copied(group: dict[str, Any]) -> dict[str, Any]:
    """A group with its own tensors (an lr may be one); the parameters are the same ones."""
    return {
        name: value.clone() if name != "params" and isinstance(value, Tensor) else value
        for name, value in group.items()
    }
