"""The call table: what the engine's loop calls at each mount point, and what an error in a hook does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

from hydraloop.engine.hook import GENERAL_POINTS, MOUNT_POINTS, Hook, OnError
from hydraloop.engine.hook_order import Slot, in_order, overrides, slot_of
from hydraloop.errors import UserError

log = logging.getLogger(__name__)

Call = Callable[..., None]


_CLOSING = frozenset({"on_exception", "after_train", "after_run"})
"""Where every hook is called whatever another one raised, so each has a call of its own."""


class Stages:
    """The call table: for each mount point, an attribute with what to call there.

    Built once, from overridden methods only, so a mount point that nobody uses is an empty tuple and costs nothing::

        for call in stages.before_train_iter:
            call(engine, batch_idx, batch)

    A call goes through the hooks of its mount point in order, applies each one's `on_error` and adds up the time each
    takes (about 0.1 µs a hook). A hook with nothing to do at a point, as it is configured (`idle_points`), is left out.

    Args:
        hooks: by name, default hooks first, in the order of registration.
        slots: the same hooks' places.
        on_error: by name, what an exception in the hook does.
        rank: hooks with `rank_zero_only` are left out of the table where this is not 0.
    """

    def __init__(
        self, hooks: Mapping[str, Hook], slots: Sequence[Slot], on_error: Mapping[str, OnError], rank: int = 0
    ) -> None:
        self.slots = in_order(slots)
        self.seconds: dict[str, list[float]] = {slot.name: [0.0] for slot in self.slots}
        """By name, a cell with the seconds spent in the hook, without those of hooks called from within it."""
        self.news: set[str] = set()
        """Hooks that have been switched off (`on_error=disable`) since somebody last emptied the set."""
        self.all_seconds = [0.0]
        """A cell with the seconds spent in all hooks."""
        self._policies: dict[str, _Policy] = {}
        table: dict[str, list[_Part]] = {point: [] for point in MOUNT_POINTS}
        for slot in self.slots:
            hook = hooks[slot.name]
            policy = self._policies[slot.name] = _Policy(slot.name, on_error[slot.name], self.news)
            if hook.rank_zero_only and rank != 0:
                continue
            for point, method in _methods(hook):
                if point not in hook.idle_points:
                    table[point].append((method, policy, self.seconds[slot.name]))
        for point, parts in table.items():
            groups = [[part] for part in parts] if point in _CLOSING else [parts] if parts else []
            setattr(self, point, tuple(_one_call(point, group, self.all_seconds) for group in groups))

    def may_only_raise(self, name: str) -> bool:
        """Whether an error in the hook ends the run, on every rank."""
        return self.on_error(name) == "raise"

    def on_error(self, name: str) -> OnError:
        """What an error in the hook does."""
        return self._policies[name].on_error

    def disable(self, name: str) -> None:
        """Switch a hook off, since it failed on another rank; its closing points are still called."""
        policy = self._policies.get(name)
        if policy is not None and not policy.disabled:
            policy.disabled = True
            log.warning("hook %s failed on another rank and is switched off (on_error=disable)", name)

    def run_for(self, name: str, point: str, work: Callable[..., Any], *args: Any) -> Any:
        """Do work of the hook `name` outside its mount points: its `on_error` and its clock apply.

        Returns:
            What the work returns; None where it failed and the run goes on.
        """
        result: list[Any] = [None]

        def kept(*args: Any) -> None:
            result[0] = work(*args)

        _one_call(point, [(kept, self._policies[name], self.seconds[name])], self.all_seconds)(*args)
        return result[0]

    @classmethod
    def of(
        cls,
        hooks: Mapping[str, Hook],
        slots: Sequence[Slot] | None = None,
        on_error: Mapping[str, OnError] | None = None,
        rank: int = 0,
    ) -> Stages:
        """The table of these hooks; slots and `on_error` come from their classes where they are not given."""
        from_classes = [slot_of(name, hook) for name, hook in hooks.items()]
        return cls(
            hooks,
            from_classes if slots is None else slots,
            {name: hook.on_error for name, hook in hooks.items()} if on_error is None else on_error,
            rank,
        )

    def __getattr__(self, point: str) -> tuple[Call, ...]:
        # Only for the type checker and misspellings: every mount point is set in __init__.
        raise AttributeError(f"{point!r} is no mount point")


def _methods(hook: Hook) -> list[tuple[str, Call]]:
    """(mount point, bound method) of everything the hook overrides, general points before specific ones."""
    cls = type(hook)
    found: list[tuple[str, Call]] = []
    for general, points in GENERAL_POINTS.items():
        if not overrides(cls, general):
            continue
        method = getattr(hook, general)
        for point, mode in points:
            # after_val_epoch and after_test_epoch come with metrics, which the general point does not take.
            call = partial(_without_metrics, method) if general == "after_epoch" else method
            found.append((point, partial(call, mode=mode)))
    found.extend((point, getattr(hook, point)) for point in MOUNT_POINTS if overrides(cls, point))
    return found


def _without_metrics(method: Call, engine: Any, _metrics: Any = None, *, mode: str) -> None:
    method(engine, mode=mode)


@dataclass(slots=True)
class _Policy:
    """What the errors of one hook do."""

    name: str
    on_error: OnError
    news: set[str]
    """Where it says that the hook is switched off."""
    disabled: bool = False

    def handle(self, error: Exception, point: str) -> None:
        """Raise the error, or say what happened and let the run go on."""
        # A user's mistake (an impossible option) is never something to train through.
        if self.on_error == "raise" or isinstance(error, UserError):
            error.add_note(f"hydraloop: raised in the hook {self.name!r} at {point}")
            raise error
        if self.on_error == "disable":
            self.disabled = True
            self.news.add(self.name)
        goes_on = "is switched off" if self.disabled else "goes on"
        log.warning(
            "hook %s failed at %s and %s (on_error=%s): %s: %s",
            self.name, point, goes_on, self.on_error, type(error).__name__, error,
            exc_info=error,
        )  # fmt: skip


_Part = tuple[Call, _Policy, list[float]]
"""A bound method, its hook's policy, and the cell for its hook's seconds."""


def _one_call(point: str, parts: Sequence[_Part], nested: list[float]) -> Call:
    """The methods of a mount point as one call: a single clock reading stands between two hooks.

    Args:
        nested: a cell with the seconds of all hooks, by which a hook's time is told from that of those it makes run.
    """
    clock = perf_counter
    closing = point in _CLOSING  # a hook that is switched off still closes what it opened

    def call(*args: Any) -> None:
        start = clock()
        for method, policy, seconds in parts:
            if policy.disabled and not closing:
                continue
            others = nested[0]
            try:
                method(*args)
            except Exception as error:
                policy.handle(error, point)
            now = clock()
            own = now - start - (nested[0] - others)
            seconds[0] += own
            nested[0] += own
            start = now

    return call
