"""The table of hooks by mount point."""

from __future__ import annotations

from hydraloop.engine.hook_order import Slot, by_mount_point, format_order, in_order, slot_of
from tests.helpers import at


def test_the_printed_order_names_each_mount_point_with_its_hooks_and_priorities() -> None:
    slots = in_order(
        [
            slot_of("mine", at("after_run", print), 70),
            slot_of("theirs", at("after_run", print), "HIGH"),
            Slot("unknown", 50, is_default=False),
        ]
    )
    assert [line.split() for line in format_order(slots).splitlines()] == [
        ["after_run", "theirs", "(30),", "mine", "(70)"],
        ["class", "not", "imported", "unknown", "(50)"],
    ]
    assert list(by_mount_point(slots)) == ["after_run", "class not imported"]
