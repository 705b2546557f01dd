"""The call table: the hooks that the loop calls at each mount point."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any

from hydraloop.engine.hook import GENERAL_POINTS, MOUNT_POINTS, Hook, OnError
from hydraloop.engine.hook_errors import Policy
from hydraloop.engine.hook_order import Slot, in_order, overrides, slot_of

log = logging.getLogger(__name__)

Call = Callable[..., None]
_CLOSING = frozenset({"on_exception", "after_train", "after_run"})
"""Points at which every hook has a separate call, so that all are called even if one raises."""


class Stages:
    """The call table: for each mount point, an attribute with the calls of that point.

    It is built once, from overridden methods only; an unused mount point is an empty tuple and costs nothing::

        for call in stages.before_train_iter:
            call(engine, batch_idx, batch)

    A call runs the hooks of its mount point in order, applies each hook's `on_error` and adds up its time (about 0.1 µs
    for each hook). A hook is left out at its `idle_points`.

    Args:
        hooks: by name, default hooks first, in the order of registration.
        slots: the places of the same hooks; None: from their classes.
        on_error: by name; without an entry, that of its class.
        rank: on ranks other than 0, hooks with `rank_zero_only` are left out.
    """

    def __init__(
        self,
        hooks: Mapping[str, Hook],
        slots: Sequence[Slot] | None = None,
        on_error: Mapping[str, OnError] | None = None,
        rank: int = 0,
    ) -> None:
        self.slots = in_order([slot_of(name, hook) for name, hook in hooks.items()] if slots is None else slots)
        self.seconds: dict[str, list[float]] = {slot.name: [0.0] for slot in self.slots}
        """By name, a list with one entry: the seconds spent in the hook, without those in hooks that it calls."""
        self.all_seconds = [0.0]
        """The same for all hooks together."""
        self.newly_disabled: set[str] = set()
        """Hooks that `on_error=disable` has switched off on this rank, before the other ranks were told."""
        self._policies: dict[str, Policy] = {}
        table: dict[str, list[_Entry]] = {point: [] for point in MOUNT_POINTS}
        for slot in self.slots:
            hook = hooks[slot.name]
            rule = (on_error or {}).get(slot.name, hook.on_error)
            policy = self._policies[slot.name] = Policy(slot.name, rule, self.newly_disabled)
            if not hook.rank_zero_only or rank == 0:
                for point, method in _methods(hook):
                    table[point].append((method, policy, self.seconds[slot.name]))
        for point, entries in table.items():
            groups = [[entry] for entry in entries] if point in _CLOSING else [entries] if entries else []
            setattr(self, point, tuple(_one_call(point, group, self.all_seconds) for group in groups))

    def on_error(self, name: str) -> OnError:
        """Return what an error in the hook does; with `raise`, it ends the run on every rank."""
        return self._policies[name].on_error

    def disable(self, name: str) -> None:
        """Switch off a hook that failed on another rank; its closing points are still called."""
        policy = self._policies.get(name)
        if policy is not None and not policy.disabled:
            policy.disabled = True
            log.warning("hook %s failed on another rank and is switched off (on_error=disable)", name)

    def report_repeated(self) -> None:
        """Log how many errors of each hook were only counted, at the end of a run. The next run counts from 0."""
        for policy in self._policies.values():
            policy.report_repeated()

    def run_for(self, name: str, point: str, work: Callable[..., Any], *args: Any) -> Any:
        """Do work for a hook outside its mount points, with its `on_error` and its time.

        Returns:
            What the work returns; None if it failed and the run continues.
        """
        results: list[Any] = []

        def append_result(*args: Any) -> None:
            results.append(work(*args))

        _one_call(point, [(append_result, self._policies[name], self.seconds[name])], self.all_seconds)(*args)
        return results[0] if results else None

    def __getattr__(self, point: str) -> tuple[Call, ...]:
        # For the type checker and for misspellings: every mount point is set in __init__.
        raise AttributeError(f"{point!r} is not a mount point")


def _methods(hook: Hook) -> list[tuple[str, Call]]:
    """Return (mount point, bound method) for each method that a hook overrides, except at its `idle_points`."""
    found: list[tuple[str, Call]] = []
    for general, points in GENERAL_POINTS.items():
        if overrides(type(hook), general):
            method = getattr(hook, general)
            # after_val_epoch and after_test_epoch pass metrics, and after_epoch does not take them.
            call = partial(_without_metrics, method) if general == "after_epoch" else method
            found.extend((point, partial(call, mode=mode)) for point, mode in points)
    found.extend((point, getattr(hook, point)) for point in MOUNT_POINTS if overrides(type(hook), point))
    return [(point, method) for point, method in found if point not in hook.idle_points]


def _without_metrics(method: Call, engine: Any, _metrics: Any = None, *, mode: str) -> None:
    method(engine, mode=mode)


_Entry = tuple[Call, Policy, list[float]]
"""A bound method, its hook's policy, and the list with its hook's seconds."""


def _one_call(point: str, entries: Sequence[_Entry], all_seconds: list[float]) -> Call:
    """Return one call for the methods of a mount point. It reads the clock once between two hooks.

    Args:
        all_seconds: the seconds of all hooks, to subtract the time of hooks that a hook calls.
    """
    clock = perf_counter
    closing = point in _CLOSING  # a hook that is switched off still closes its files

    def call(*args: Any) -> None:
        start = clock()
        for method, policy, seconds in entries:
            if policy.disabled and not closing:
                continue
            others = all_seconds[0]
            try:
                method(*args)
            except Exception as error:
                policy.handle(error, point)
            now = clock()
            own = now - start - (all_seconds[0] - others)
            seconds[0] += own
            all_seconds[0] += own
            start = now

    return call
