"""TrackerHook: what the hooks mlflow, wandb and tensorboard have in common. It starts a sender and ends it."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hydraloop.engine.hook import Hook, Priority
from hydraloop.errors import UserError, not_installed
from hydraloop.option_checks import check_at_least
from hydraloop.run_files.processes import is_ancestor
from hydraloop.run_files.record_log import FILENAME, count
from hydraloop.run_files.result import describe
from hydraloop.safety.secrets import mask_text, masked
from hydraloop.tracking import run_description
from hydraloop.tracking.cursor import Cursor, sync_command
from hydraloop.tracking.link import Link
from hydraloop.tracking.starting import SENDERS
from hydraloop.tracking.tracker import Finish, Sweep

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine

log = logging.getLogger(__name__)

_DAY = 86_400
_OPENING = 30.0
"""Least seconds to wait for a service that must be available: importing its library alone may take ten."""


class TrackerError(Exception):
    """A tracker does not work, and its `on_error` is not `warn`."""


class TrackerHook(Hook):
    """Sends the run's records to a tracking service.

    The training thread does nothing for a record: the `logger` hook writes it to `metrics.jsonl`. A sender, a
    separate process, reads it there and sends it, in batches, about once a second. A service that is down or slow does
    not slow training. `python -m hydraloop sync` sends what was not sent.

    Args:
        flush_timeout: seconds to send the rest after the run has ended, from 0 to 86,400 (a day).
        options: the subclass's options, as plain JSON.
        interval: the records of every `interval`-th iteration are sent, at least 1. The records of evaluations and
            those that announce objects (pictures, histograms) are always sent.

    Raises:
        UserError: `flush_timeout` is negative or longer than a day, or `interval` is below 1.
    """

    kind: ClassVar[str]
    """Dotted path of the `Tracker` class, which the sender imports. The allowlist must permit it."""
    library: ClassVar[str | None] = None
    """Package that the tracker imports. If it is not installed, a warning before training says so."""
    shares_sender: ClassVar[bool] = False
    """Whether one process may serve several jobs of a sweep, each in a thread."""
    priority = Priority.VERY_LOW
    runs_after = ("logger",)
    on_error = "warn"
    rank_zero_only = True

    def __init__(self, *, flush_timeout: float, options: Mapping[str, Any], interval: int = 1) -> None:
        if not 0 <= flush_timeout <= _DAY:
            problem = f"{flush_timeout} is negative" if flush_timeout < 0 else f"{flush_timeout} is longer than a day"
            raise UserError(problem, key="flush_timeout", remedy=f"Use seconds, 0 or more, up to {_DAY}.")
        self._flush_timeout = flush_timeout
        check_at_least(1, interval=interval)
        self._options = {**options, "flush_timeout": flush_timeout, "interval": interval}
        self._link: Link | None = None
        self._begun = self._logged = self._leaves = False

    def before_run(self, engine: Engine) -> None:
        """Start the sender, which imports its library while the run is prepared.

        Raises:
            UserError: the run has no `logger` hook, whose records are sent. Or `on_error=raise`, and the library is not
                installed.
        """
        if engine.messages.read("record_log") is None:
            raise UserError(
                "it sends the records of default_hooks.logger, which this run does not have",
                key=self.key,
                remedy="Keep the logger, or remove this hook.",
            )
        self._begun = self._logged = False
        on_error = engine.calls.on_error(self.name)
        sweep = _sweep_that_waits(engine.run_dir)
        self._leaves = sweep is not None
        self._link = Link(
            engine.run_dir,
            self.name,
            self.kind,
            self._options,
            training_continues=on_error != "raise",
            sweep=sweep,
            is_shared=self.shares_sender and engine.distributed.world_size == 1,  # ranks have other variables
            trust=engine.messages.read("trust"),
        )
        if self._is_installed():
            self._link.start()
            return
        mistake = not_installed(self.library or "", key=self.key)
        if on_error == "raise":
            raise mistake
        self._link.refuse(f"{mistake.problem}: {mistake.remedy}")

    def before_train(self, engine: Engine) -> None:
        """Let the sender begin. The log has been cut to the iteration at which the run resumes.

        Raises:
            UserError: `on_error=raise`, and the service does not open the run within `flush_timeout`, at least 30 s.
        """
        self._begin(engine, trains=True)
        link, patience = self._link, max(self._flush_timeout, _OPENING)
        if engine.calls.on_error(self.name) == "raise" and link is not None and not link.until_opened(patience):
            raise UserError(
                link.trouble or f"no answer within {patience:g} s",
                key=self.key,
                remedy=f"Fix it, or train without waiting for the service: {self.key}.on_error=warn",
            )

    def on_log(self, engine: Engine, record: Mapping[str, Any]) -> None:
        """Do nothing while the tracker works: the record is in the log already.

        Raises:
            TrackerError: the tracker does not work, and `on_error` is not `warn`.
        """
        self._logged = True
        trouble = None if self._link is None else self._link.trouble
        if trouble is not None and engine.calls.on_error(self.name) != "warn":
            raise TrackerError(trouble)

    def after_run(self, engine: Engine) -> None:
        """Send the rest in bounded time, and add the number of records sent to the summary.

        All trackers are told to finish before the first one is awaited, so together they take no longer than the
        slowest. Ctrl-C ends the waiting and does not change the status of the run. In a sweep,
        the sender sends the rest while this process continues.
        """
        trackers = [hook for hook in engine.hooks.values() if isinstance(hook, TrackerHook)]
        try:
            for hook in trackers:
                hook._finish(engine)
            if self._link is not None:
                self._link.leave() if self._leaves else self._link.wait()
        except KeyboardInterrupt:  # result.json is written already
            log.warning("interrupted: not waiting for the trackers to send the rest")
            for link in (hook._link for hook in trackers):
                if link is not None:
                    link.stop()
        if self._link is not None:
            summary = self._summary(engine.run_dir, self._link)
            self._link = None
            told = {**(engine.messages.read("tracked") or {}), self.name: summary}
            engine.messages.provide("tracked", lambda: told)

    def check_only_one(self, engine: Engine, what: str) -> None:
        """Check that a run has only one hook of this class.

        Args:
            what: what two of them would do, for the message: `write the same files`.
        """
        same = [name for name, other in engine.hooks.items() if type(other) is type(self)]
        if len(same) > 1:
            raise UserError(f"{' and '.join(same)} would {what}", key=self.key, remedy="Remove one of them.")

    def _begin(self, engine: Engine, *, trains: bool) -> None:
        """Let the sender open the run. The first tracker describes the run for all of them.

        A separate validation or test is not an attempt: it leaves an existing description as it is.
        """
        if self._link is None:
            return
        described = engine.messages.read("described") is not None
        if not described and (trains or run_description.read(engine.run_dir) is None):
            run_description.write(run_description.run_of(engine))
            engine.messages.provide("described", lambda: True)
        if Cursor.load(engine.run_dir, self.name) is None:  # for `sync.py`, if the sender dies before it writes one
            with suppress(OSError):  # the sender reports a full disk
                Cursor(self.kind, masked(self._options)).save(engine.run_dir, self.name)
        self._begun = True
        self._link.begin()

    def _finish(self, engine: Engine) -> None:
        if self._link is None:
            return
        if self._logged and not self._begun:  # a separate validation or test
            self._begin(engine, trains=False)
        self._link.finish(_ending(engine))

    def _is_installed(self) -> bool:
        if self.library is None:
            return True
        found = find_spec(self.library)
        return found is not None and found.origin is not None  # not only a folder of this name

    def _summary(self, run_dir: Path, link: Link) -> str:
        cursor, total = Cursor.load(run_dir, self.name), count(run_dir / FILENAME)
        sent = 0 if cursor is None else cursor.sent
        text = f"{sent:,} of {total:,} records sent"
        if cursor is not None and cursor.refused:
            text += f", {len(cursor.refused):,} refused"
        if cursor is not None and cursor.left_out:
            text += f", {cursor.left_out:,} left out by interval"
        if cursor is not None and cursor.finished and cursor.index == total:
            if cursor.complete:
                return f"{text}, {cursor.where}" if cursor.where else text
            text += ", but not all files"
        why = link.trouble or link.died
        text += "" if why is None else f" ({mask_text(why)})"
        if link.is_alive():
            return f"{text}; the rest is being sent, for up to {self._flush_timeout:g} s"
        return f"{text}; {sync_command(run_dir, [self.kind])} sends the rest"


def _sweep_that_waits(run_dir: Path) -> Sweep | None:
    """Return the sweep of a job whose controller runs, and waits for the senders of its jobs."""
    sweep = run_description.sweep_of(run_dir) if SENDERS in os.environ else None
    if sweep is None or sweep.ended is not None or sweep.host != socket.gethostname():
        return None
    return sweep if is_ancestor(sweep.pid, sweep.started) else None


def _ending(engine: Engine) -> Finish:
    """Return how the run ended. A separate validation or test leaves that as it was."""
    if engine.outcome.result is not None:
        return run_description.finish_of(engine.outcome.result.status, engine.outcome.result.error)
    run = run_description.read(engine.run_dir)
    before = None if run is None else run_description.ending(engine.run_dir, run.attempt)
    if before is not None and (before.status != "killed" or engine.messages.read("described") is None):
        return before
    error = engine.error
    return run_description.finish_of(
        "finished" if error is None else "failed", None if error is None else describe(error)
    )
