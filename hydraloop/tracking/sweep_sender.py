"""The sender of a sweep's jobs, as the controller sees it: it follows the jobs that run. Does not import torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydraloop.safety.secrets import mask_text, masked
from hydraloop.tracking import run_description
from hydraloop.tracking.cursor import run_dirs, sync_command
from hydraloop.tracking.sender import Sender
from hydraloop.tracking.sending import is_complete

log = logging.getLogger(__name__)

_NAMED = 5
"""Incomplete runs that are named. More do not fit on a screen."""


class SweepSender:
    """Starts a sender when a job has a tracker, and ends it.

    Args:
        folder: of the sweep.
        hooks: the options of the hooks of a job, by name. They may contain secrets.
    """

    def __init__(self, folder: Path, hooks: Mapping[str, Any] = {}) -> None:
        self._folder = folder.absolute()
        found = {name: dict(options) for name, options in hooks.items() if isinstance(options, Mapping)}
        hidden = {
            name: {key: value for key, value in options.items() if value != masked({name: options})[name][key]}
            for name, options in found.items()
        }
        self._sender = Sender(self._folder, hidden)
        self._jobs: set[Path] = set()
        """Directories of jobs that run, before the sender was started."""

    def job_begins(self, run_dir: Path) -> None:
        """Follow the run of a job."""
        self._jobs.add(run_dir)
        self._sender.job_begins(run_dir)

    def job_ends(self, run_dir: Path) -> None:
        """Note that a job does not run any more."""
        self.check()
        self._jobs.discard(run_dir)
        self._sender.job_ends(run_dir)

    def check(self) -> None:
        """Start the sender if a job has a tracker, or if it has died. Called several times a second."""
        if self._sender.is_started:
            self._sender.check()
        elif any(run_description.is_described(run_dir, 0) for run_dir in self._jobs):
            self._sender.start()

    def end(self) -> None:
        """Wait until everything is sent, at most the longest `flush_timeout`. Called after the last job."""
        incomplete, seconds = self._incomplete()
        if not self._sender.is_started:
            if not incomplete:
                return
            self._sender.start()  # for jobs that have saved after the end of an earlier controller
        self._sender.finish()
        try:
            self._sender.wait(seconds)
        except KeyboardInterrupt:
            log.warning("interrupted: not waiting for the trackers to send the rest")
            self._sender.kill()
        incomplete, _ = self._incomplete()
        for (name, kind), runs in incomplete.items():
            named = ", ".join(runs[:_NAMED]) + (f" and {len(runs) - _NAMED} others" if len(runs) > _NAMED else "")
            command = sync_command(self._folder, [kind])
            log.warning("%s: not everything is sent in %s; %s sends the rest", name, mask_text(named), command)

    def _incomplete(self) -> tuple[dict[tuple[str, str], list[str]], float]:
        """Return the runs that are not complete, by name and kind of the tracker, and the longest `flush_timeout`."""
        found: dict[tuple[str, str], list[str]] = {}
        longest = 0.0
        for run_dir in run_dirs(self._folder):
            number, trackers = run_description.trackers_of(run_dir)
            for name, tracker in trackers.items():
                if not is_complete(run_dir, name, number):
                    found.setdefault((name, tracker["kind"]), []).append(str(run_dir.relative_to(self._folder)))
                    longest = max(longest, float(tracker["options"]["flush_timeout"]))
        return found, longest
