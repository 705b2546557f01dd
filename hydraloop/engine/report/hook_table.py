"""The table of hooks by mount point, printed before training and by the dry run. Imports no torch."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from hydraloop.engine.hook_order import Slot
from hydraloop.engine.mount_points import MOUNT_POINTS

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
    return _lines(
        {
            point: ", ".join(f"{slot.name} ({slot.priority})" for slot in found)
            for point, found in by_mount_point(slots).items()
        }
    )


def format_folded(slots: Sequence[Slot], defaults: Mapping[str, int]) -> tuple[str, str]:
    """Return the order in short: a list of all hooks, and a line for each mount point of a custom hook.

    A default hook with a changed priority counts as a custom hook; other default hooks are folded to `…` in the lines.

    Args:
        slots: in calling order.
        defaults: by name, the priority of the hook's class.

    Returns:
        The list of all hooks with a legend, 68 columns wide; the lines of mount points, empty if no hook uses one.
    """

    def named(slot: Slot) -> bool:
        return not slot.is_default or slot.priority != defaults[slot.name]

    rows: dict[str, str] = {}
    for point, found in by_mount_point(slots).items():
        if any(map(named, found)):
            names = [slot.name if named(slot) else "…" for slot in found]
            rows[point] = ", ".join(
                name for index, name in enumerate(names) if name != "…" or index == 0 or names[index - 1] != "…"
            )
    legend = "They run in this order. engine.verbose=true lists the mount points."
    if rows:
        legend = (
            "They run in this order. Below, … means default hooks.\n"
            "engine.verbose=true lists all hooks at all mount points."
        )
    order = ", ".join(f"{slot.name}\xa0({slot.priority})" for slot in slots)  # a name and its number stay together
    return "\n".join([textwrap.fill(order, COLUMNS).replace("\xa0", " "), legend]), _lines(rows)


def _lines(rows: Mapping[str, str]) -> str:
    width = max((len(point) for point in rows), default=0)
    return "\n".join(f"  {point:<{width}}  {hooks}" for point, hooks in rows.items())
