"""The order in which hooks are called, the check of that order, and the hooks that a run must have.

The dry run uses this file too, without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hydraloop.engine.hook import GENERAL_POINTS, MOUNT_POINTS, Hook, Priority, check_hook
from hydraloop.errors import Remedy, UserError

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
                allow = ", or set engine.check_order=false to allow this order."
                higher = (str(slot.priority), str(other.priority + 1))
                remedy = Remedy(f"Give it a number above {other.priority}{allow}", higher)
                if other.priority == 100:
                    text = f"Give {earlier} a number below {slot.priority}{allow}"
                    remedy = Remedy(text, add=[f"{key_of(earlier)}.priority={slot.priority - 1}"])
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


def in_place(hooks: Mapping[str, Hook | None], slots: Sequence[Slot] | None) -> tuple[dict[str, Hook], list[Slot]]:
    """Return the hooks of an engine, which now know their names, and their places in the order.

    Args:
        hooks: by name; None for a hook that is left out explicitly.
        slots: the places of these hooks; None: from their classes.

    Raises:
        UserError: a hook does not fit the engine.
    """
    found = {name: hook for name, hook in hooks.items() if hook is not None}
    for name, hook in found.items():
        check_hook(hook, f"hooks.{name}")
        hook.attach(name, f"hooks.{name}")
    return found, [slot_of(name, hook) for name, hook in found.items()] if slots is None else [*slots]


def check_needed(hooks: Mapping[str, Hook | None], *, scheduled: bool, has_epochs: bool) -> None:
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
        remedy=Remedy(
            "For a constant learning rate, use scheduler={}. Otherwise leave this null out. In Python, give "
            'hooks={"param_scheduler": hydraloop.hooks.ParamSchedulerHook()}.',
            add=["scheduler={}"],
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
