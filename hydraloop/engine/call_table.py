"""The call table: which hooks are called at each mount point, and what an error in a hook does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from traceback import walk_tb
from types import CodeType
from typing import TYPE_CHECKING, Any

from hydraloop.engine.hook import GENERAL_POINTS, MOUNT_POINTS, Call, Hook, OnError
from hydraloop.engine.hook_order import Slot, in_order, slot_of
from hydraloop.errors import UserError

log = logging.getLogger(__name__)


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
