"""A tracker of the project whose sweeps are killed: its followers can be killed, too. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from hydraloop.tracking import Finish, Record, Tracker


class Nowhere(Tracker):
    """Sends to nowhere."""

    def open(self) -> None:
        """Nothing is there."""

    def send(self, records: Sequence[Record]) -> None:
        """Nothing is sent."""

    def finish(self, finish: Finish) -> None:
        """Nothing is told."""
