"""The table of hooks by mount point, printed before training and by the dry run. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

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
    table = by_mount_point(slots)
    width = max((len(point) for point in table), default=0)
    return "\n".join(
        f"  {point:<{width}}  {', '.join(f'{slot.name} ({slot.priority})' for slot in found)}"
        for point, found in table.items()
    )
