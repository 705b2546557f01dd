"""The order in which hooks are called, and the check of that order. The dry run uses this file too, without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hydraloop.engine.hook import GENERAL_POINTS, MOUNT_POINTS, Hook, Priority
from hydraloop.errors import UserError


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
    return Slot(name, number, is_default, tuple(hook.runs_after), mount_points_of(type(hook)))


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
                above, below = f"Give it a number above {other.priority}", f"Give {earlier} a number below"
                remedy = above if other.priority < 100 else f"{below} {slot.priority}"
                raise UserError(
                    f"{slot.name} (priority {slot.priority}) must run after {earlier} (priority {other.priority}), "
                    f"because it uses its results",
                    key=f"{key_of(slot.name)}.priority",
                    remedy=f"{remedy}, or set engine.check_order=false to allow this order.",
                )


def mount_points_of(cls: type[Hook]) -> tuple[str, ...]:
    """Return the mount points at which hooks of the class are called, general ones included, in the order of a run."""
    used = {point for point in MOUNT_POINTS if overrides(cls, point)}
    for general, points in GENERAL_POINTS.items():
        if overrides(cls, general):
            used.update(point for point, _ in points)
    return tuple(point for point in MOUNT_POINTS if point in used)


def overrides(cls: type[Hook], method: str) -> bool:
    """Return whether the class overrides a method of `Hook`."""
    return getattr(cls, method) is not getattr(Hook, method)
