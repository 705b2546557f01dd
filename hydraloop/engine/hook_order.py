"""The order in which hooks are called, its check, the call table, and what an error in a hook does.

The dry run uses the order, without torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from traceback import walk_tb
from types import CodeType
from typing import TYPE_CHECKING, Any

from hydraloop.engine.hook import GENERAL_POINTS, MOUNT_POINTS, Call, Hook, OnError, Priority, check_hook
from hydraloop.errors import UserError

log = logging.getLogger(__name__)


NEEDED = ("sampler_seed", "param_scheduler")
"""The hooks without which a run trains worse, and nothing says so."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A hook's place in the order."""

    name: str
    """Its key in the config."""
    priority: int
    """0..100, 0 first."""
    is_default: bool
    """From the group `default_hooks`: before custom hooks of the same priority."""
    runs_after: tuple[str, ...] = ()
    """Names of the hooks that must run before it."""
    mount_points: tuple[str, ...] | None = None
    """The mount points it uses; None if its class was not imported."""


def slot_of(name: str, hook: Hook, priority: int | str | None = None, *, is_default: bool = False) -> Slot:
    """Return the place of a hook; without `priority`, that of its class counts."""
    number = Priority.of(hook.priority if priority is None else priority, key=f"{hook.key}.priority")
    return Slot(name, number, is_default, tuple(hook.runs_after), mount_points_of(hook.overrides))


def in_order(slots: Iterable[Slot]) -> list[Slot]:
    """Sort by priority, then default hooks before custom ones, then by registration."""
    return sorted(slots, key=lambda slot: (slot.priority, not slot.is_default))


def check_order(slots: Sequence[Slot], *, key_of: Callable[[str], str] = lambda name: name) -> None:
    """Refuse an order in which a hook comes before one that it `runs_after`.

    Args:
        slots: in calling order.
        key_of: from a hook's name to its full key in the config.

    Raises:
        UserError: names both hooks, their priorities, and what to change.
    """
    position = {slot.name: index for index, slot in enumerate(slots)}
    for slot in slots:
        for earlier in slot.runs_after:
            if position.get(earlier, -1) > position[slot.name]:
                other = slots[position[earlier]]
                remedy = f"Give it a number above {other.priority}."
                if other.priority == 100:
                    remedy = f"Give {earlier} a number below {slot.priority}."
                raise UserError(
                    f"{slot.name} (priority {slot.priority}) must run after {earlier} (priority {other.priority}), "
                    f"because it uses its results",
                    key=f"{key_of(slot.name)}.priority",
                    remedy=remedy,
                )


def mount_points_of(overrides: Callable[[str], bool]) -> tuple[str, ...]:
    """Return the mount points at which a hook is called, in the order of a run.

    Args:
        overrides: whether the class of the hook overrides a mount point, or a general one.
    """
    used = {point for point in MOUNT_POINTS if overrides(point)}
    for general, points in GENERAL_POINTS.items():
        if overrides(general):
            used.update(point for point, _ in points)
    return tuple(point for point in MOUNT_POINTS if point in used)


def missing(given: Container[str], *, scheduled: bool) -> list[str]:
    """Return the names of the hooks to add.

    Args:
        given: the names of all hooks, also of those that are left out explicitly.
        scheduled: whether the run has schedules.
    """
    return [name for name in NEEDED if name not in given and (scheduled or name != "param_scheduler")]


def assign_slots(hooks: Mapping[str, Hook | None], slots: Sequence[Slot] | None) -> tuple[dict[str, Hook], list[Slot]]:
    """Return the hooks of an engine, which now know their names, and their places in the order.

    Args:
        hooks: by name; None for a hook that is left out explicitly.
        slots: the places of these hooks; None: from their classes.

    Raises:
        UserError: a hook does not fit the engine, or comes before one that it `runs_after`.
    """
    found = {name: hook for name, hook in hooks.items() if hook is not None}
    for name, hook in found.items():
        check_hook(hook, f"hooks.{name}")
        hook.attach(name, f"hooks.{name}")
    places = [slot_of(name, hook) for name, hook in found.items()] if slots is None else [*slots]
    check_order(in_order(places), key_of=lambda name: found[name].key)
    return found, places


def check_needed_hooks(hooks: Mapping[str, Hook | None], *, scheduled: bool, has_epochs: bool) -> None:
    """Refuse to train without the hooks that apply the schedules and set the epoch of the train loader.

    Args:
        hooks: by name; None for a hook that is left out explicitly.
        scheduled: whether the run has schedules.
        has_epochs: whether the order of the train loader depends on its `set_epoch`.

    Raises:
        UserError: there are schedules, and `param_scheduler` is missing or left out; or the loader has `set_epoch`, and
            `sampler_seed` is missing.
    """
    if scheduled and hooks.get("param_scheduler") is None:
        raise not_applied()
    if has_epochs and "sampler_seed" not in hooks:
        raise UserError(
            "no hook calls set_epoch of the train loader, so all epochs would have the same order",
            key="hooks.sampler_seed",
            remedy='Give hooks={"sampler_seed": hydraloop.hooks.DistSamplerSeedHook()}. None keeps the order.',
        )


def not_applied() -> UserError:
    """Return the error for schedules that no hook would apply."""
    return UserError(
        "the schedules of this run would not be applied, and the learning rate would be constant",
        key="default_hooks.param_scheduler",
        remedy=(
            "For a constant learning rate, use scheduler=[]. Otherwise leave this null out. In Python, give "
            'hooks={"param_scheduler": hydraloop.hooks.ParamSchedulerHook()}.'
        ),
    )


COLUMNS = 68
"""Width of lists of hooks and metrics: with a label, they fit into 80 columns."""


def by_mount_point(slots: Sequence[Slot]) -> dict[str, list[Slot]]:
    """Return {mount point: its slots in order}, without unused points.

    Slots with unknown mount points are under the key "class not imported".
    """
    table = {point: [slot for slot in slots if point in (slot.mount_points or ())] for point in MOUNT_POINTS}
    unknown = [slot for slot in slots if slot.mount_points is None]
    return {point: found for point, found in [*table.items(), ("class not imported", unknown)] if found}


def format_order(slots: Sequence[Slot]) -> str:
    """Return the order by mount point, one line for each."""
    table = by_mount_point(slots)
    width = max((len(point) for point in table), default=0)
    return "\n".join(
        f"  {point:<{width}}  {', '.join(f'{slot.name} ({slot.priority})' for slot in found)}"
        for point, found in table.items()
    )


# The calls. -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Policy:
    """What an error in a hook does: it ends the run, or is logged once for each type and place."""

    name: str
    on_error: OnError
    newly_disabled: set[str]
    disabled: bool = False
    _logged: set[tuple[type, CodeType, int]] = field(default_factory=set)

    def handle(self, error: Exception, point: str) -> None:
        """Raise the error, or log it with its traceback the first time, and let the run continue."""
        if self.on_error == "raise" or isinstance(error, UserError):  # a user's mistake always ends the run
            error.add_note(f"hydraloop: raised in the hook {self.name!r} at {point}")
            raise error
        if self.on_error == "disable":
            self.disabled = True
            self.newly_disabled.add(self.name)
        *_, (frame, line) = walk_tb(error.__traceback__)
        cause = (type(error), frame.f_code, line)
        if cause in self._logged:
            return
        self._logged.add(cause)
        then = "it is switched off" if self.disabled else "the run continues"
        log.warning(
            "hook %s failed at %s; %s (on_error=%s): %s: %s",
            self.name, point, then, self.on_error, type(error).__name__, error, exc_info=error,
        )  # fmt: skip


class CallTable:
    """For each mount point, an attribute with a call that calls its hooks in order: `calls.before_train()`.

    It is built once, from overridden methods only. The hooks get the engine as their first argument. A call applies
    each hook's `on_error` and adds up its time (about 0.1 µs for each hook).

    Args:
        engine: what hooks get.
        hooks: by name, default hooks first, in the order of registration.
        slots: the places of the same hooks; None: from their classes.
        on_error: by name; without an entry, that of its class.
        rank: on ranks other than 0, hooks with `rank_zero_only` are left out.
    """

    def __init__(
        self,
        engine: object,
        hooks: Mapping[str, Hook],
        slots: Sequence[Slot] | None = None,
        on_error: Mapping[str, OnError] | None = None,
        rank: int = 0,
    ) -> None:
        self.slots = in_order([slot_of(name, hook) for name, hook in hooks.items()] if slots is None else slots)
        """The places of the hooks, in the order in which they are called."""
        self.seconds: dict[str, list[float]] = {slot.name: [0.0] for slot in self.slots}
        """By name, a list with one entry: the seconds spent in the hook, without those in hooks that it calls."""
        self.newly_disabled: set[str] = set()
        """Hooks that `on_error=disable` has switched off on this rank, before the other ranks were told."""
        self.engine, self._hooks, self._rank = engine, hooks, rank
        self._running = [[0.0]]
        self._policies = {
            name: _Policy(name, (on_error or {}).get(name, hook.on_error), self.newly_disabled)
            for name, hook in hooks.items()
        }
        self.build()

    if TYPE_CHECKING:

        def __getattr__(self, point: str) -> Call: ...

    def build(self) -> None:
        """Build the table again, after the `idle_points` of a hook have changed."""
        table: dict[str, list[_Entry]] = {point: [] for point in MOUNT_POINTS}
        for slot in self.slots:
            hook = self._hooks[slot.name]
            if not hook.rank_zero_only or self._rank == 0:
                for point, method in _methods(hook):
                    entry = (partial(method, self.engine), self._policies[slot.name], self.seconds[slot.name])
                    table[point].append(entry)
        self._table = table
        for point, entries in table.items():
            setattr(self, point, _one_call(point, entries, self._running) if entries else _nothing)

    def one_by_one(self, point: str) -> list[Call]:
        """Return a call for each hook of a mount point that closes: they are all called, even if one raises."""
        return [_one_call(point, [entry], self._running, closing=True) for entry in self._table[point]]

    def on_error(self, name: str) -> OnError:
        """Return what an error in the hook does; with `raise`, it ends the run on every rank."""
        return self._policies[name].on_error

    def disable(self, name: str) -> None:
        """Switch off a hook that failed on another rank; its closing points are still called."""
        policy = self._policies.get(name)
        if policy is not None and not policy.disabled:
            policy.disabled = True
            log.warning("hook %s failed on another rank and is switched off (on_error=disable)", name)

    def run_for(self, name: str, point: str, work: Callable[..., Any], *args: Any) -> Any:
        """Do work for a hook outside its mount points, with its `on_error` and its time.

        Returns:
            What the work returns; None if it failed and the run continues.
        """
        results: list[Any] = []

        def append_result(*args: Any) -> None:
            results.append(work(*args))

        _one_call(point, [(append_result, self._policies[name], self.seconds[name])], self._running)(*args)
        return results[0] if results else None


def _methods(hook: Hook) -> list[tuple[str, Call]]:
    """Return (mount point, bound method) for each method that a hook overrides, except at its `idle_points`."""
    found: list[tuple[str, Call]] = []
    for general, points in GENERAL_POINTS.items():
        if hook.overrides(general):
            method = getattr(hook, general)
            call = partial(_without_metrics, method) if general == "after_epoch" else method
            found.extend((point, partial(call, mode=mode)) for point, mode in points)
    found.extend((point, getattr(hook, point)) for point in MOUNT_POINTS if hook.overrides(point))
    return [(point, method) for point, method in found if point not in hook.idle_points]


def _without_metrics(method: Call, engine: Any, _metrics: Any = None, *, mode: str) -> None:
    """Call `after_epoch` for after_val_epoch and after_test_epoch, which pass metrics."""
    method(engine, mode=mode)


def _nothing(*args: Any) -> None:
    """Call no hook."""


_Entry = tuple[Call, _Policy, list[float]]
"""A bound method with the engine, its hook's policy, and the list with its hook's seconds."""


def _one_call(point: str, entries: Sequence[_Entry], running: list[list[float]], *, closing: bool = False) -> Call:
    """Return one call for the methods of a mount point. It reads the clock once between two hooks.

    Args:
        running: a list with one entry, the seconds of the hook that is called now. Hooks that it calls are left out.
        closing: whether a hook that is switched off is called too, to close its files.
    """

    def call(*args: Any) -> None:
        caller = running[0]
        begin = start = perf_counter()
        try:
            for method, policy, seconds in entries:
                if policy.disabled and not closing:
                    continue
                running[0] = seconds
                try:
                    method(*args)
                except Exception as error:
                    policy.handle(error, point)
                now = perf_counter()
                seconds[0] += now - start
                start = now
        finally:
            running[0] = caller
            caller[0] -= start - begin

    return call
