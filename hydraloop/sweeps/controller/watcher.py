"""Watcher: what a controller tells of its jobs."""

from __future__ import annotations

from typing import Protocol

from hydraloop.sweeps.states import JobState


class Watcher(Protocol):
    """Shows the user what happens."""

    def started(self, state: JobState) -> None:
        """Called when a job was started, with its state."""

    def ended(self, state: JobState) -> None:
        """Called when a job has ended, also when it is retried."""

    def update(self) -> None:
        """Called several times a second."""
