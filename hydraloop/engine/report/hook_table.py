"""The table of hooks by mount point, printed before training and by the dry run. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from hydraloop.engine.hook import MOUNT_POINTS
from hydraloop.engine.hook_order import Slot


def by_mount_point(slots: Sequence[Slot]) -> dict[str, list[Slot]]:
    """Return {mount point: the slots called there, in order}, without unused points.

    Slots whose mount points are not known are listed under the key "class not imported".
    """
    table = {point: [slot for slot in slots if point in (slot.mount_points or ())] for point in MOUNT_POINTS}
    unknown = [slot for slot in slots if slot.mount_points is None]
    return {point: found for point, found in [*table.items(), ("class not imported", unknown)] if found}


def format_order(slots: Sequence[Slot]) -> str:
    """Return the order by mount point, one line for each."""
    rows = [
        (point, ", ".join(f"{slot.name} ({slot.priority})" for slot in found))
        for point, found in by_mount_point(slots).items()
    ]
    width = max((len(point) for point, _ in rows), default=0)
    return "\n".join(f"  {point:<{width}}  {hooks}" for point, hooks in rows)
