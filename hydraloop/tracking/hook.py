"""TrackerHook: what the hooks mlflow, wandb and tensorboard have in common. It starts a follower and ends it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hydraloop.engine.hook import Hook, Priority
from hydraloop.engine.report.summary import shown
from hydraloop.errors import UserError
from hydraloop.run.record_log import count
from hydraloop.run.result import describe
from hydraloop.safety.secrets import mask_text, masked
from hydraloop.tracking import description
from hydraloop.tracking.describing import run_of
from hydraloop.tracking.follower.cursor import Cursor
from hydraloop.tracking.follower.link import Link, Settings
from hydraloop.tracking.tracker import Finish

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine

log = logging.getLogger(__name__)

_DAY = 86_400
_OPENING = 30.0
"""Seconds to wait for a service that has to be there, at least: importing its library alone may take ten."""


class TrackerError(Exception):
    """A tracker does not work, and its `on_error` says that this matters."""


class TrackerHook(Hook):
    """A view of the run's records at a tracking service.

    The training thread does nothing for a record: the `logger` hook has written it to `metrics.jsonl`, and a follower,
    a process of its own, reads it there and sends it, in batches, about once a second. What is down, slow or killed
    there costs training nothing; what was not sent when the run ends is sent by `sync.py`.

    Args:
        flush_timeout: seconds that the rest may take after the run's end, from 0 to a day's.
        options: of the subclass, as plain JSON.

    Raises:
        UserError: a `flush_timeout` that is negative or longer than a day.
    """

    kind: ClassVar[str]
    """Which tracker (`kinds.py`)."""
    priority = Priority.VERY_LOW
    runs_after = ("logger",)
    on_error = "warn"
    rank_zero_only = True

    def __init__(self, *, flush_timeout: float, options: Mapping[str, Any]) -> None:
        if not 0 <= flush_timeout <= _DAY:
            problem = f"{flush_timeout} is negative" if flush_timeout < 0 else f"{flush_timeout} is longer than a day"
            raise UserError(problem, key="flush_timeout", remedy=f"Use seconds, 0 or more, up to {_DAY}.")
        self._flush_timeout, self._options = flush_timeout, {**options, "flush_timeout": flush_timeout}
        self._link: Link | None = None
        self._log = Path()
        self._begun = self._logged = self._strict = False

    def before_run(self, engine: Engine) -> None:
        """Start the follower, which imports its library while the run is made ready.

        Raises:
            UserError: there is no `logger` hook, whose records are sent.
        """
        path = engine.messages.read("record_log")
        if path is None:
            raise UserError(
                "it sends the records of default_hooks.logger, which this run has not",
                key=self.key,
                remedy="Keep the logger, or leave this hook out.",
            )
        self._log, self._begun, self._logged = path, False, False
        self._strict = engine.stages.on_error(self.name) != "warn"
        settings = Settings(self.kind, self._options, self._flush_timeout)
        self._link = Link(engine.run_dir, self.name, settings, goes_on=engine.stages.on_error(self.name) != "raise")
        self._link.start()

    def before_train(self, engine: Engine) -> None:
        """Let the follower begin: where the run goes on is known, and the log has been cut there.

        Raises:
            UserError: `on_error=raise`, and the service does not open the run within 30 s, or `flush_timeout`.
        """
        self._begin(engine, trains=True)
        link, patience = self._link, max(self._flush_timeout, _OPENING)
        if engine.stages.on_error(self.name) == "raise" and link is not None and not link.until_opened(patience):
            raise UserError(
                link.trouble or f"no answer within {patience:g} s",
                key=self.key,
                remedy=f"See to it, or train without waiting for it: {self.key}.on_error=warn",
            )

    def on_log(self, engine: Engine, record: Mapping[str, Any]) -> None:
        """Nothing, as long as all is well: the record is in the log already.

        Raises:
            TrackerError: it does not work, and `on_error` is not `warn`.
        """
        self._logged = True
        if self._strict and self._link is not None and self._link.trouble is not None:
            raise TrackerError(self._link.trouble)

    def after_run(self, engine: Engine) -> None:
        """Send the rest, in bounded time, and say in the summary how many records arrived.

        All trackers of the run are told to finish before the first is waited for: together they take no longer than
        the slowest. Ctrl-C ends the waiting, and changes nothing about how the run ended.
        """
        trackers = [hook for hook in engine.hooks.values() if isinstance(hook, TrackerHook)]
        try:
            for hook in trackers:
                hook._finish(engine)
            if self._link is not None:
                self._link.wait()
        except KeyboardInterrupt:  # the run has its result already
            log.warning("interrupted: what trackers do not have yet is not waited for")
            for link in (hook._link for hook in trackers):
                if link is not None:
                    link.stop()
        if self._link is not None:
            summary = self._summary(engine.run_dir, self._link.trouble)
            self._link = None
            told = {**(engine.messages.read("tracked") or {}), self.name: summary}
            engine.messages.provide("tracked", lambda: told)

    def _begin(self, engine: Engine, *, trains: bool) -> None:
        """Let the follower open the run, which is described once an engine, for all its trackers.

        A validation or test on its own is no attempt of its own: what has been described is as it was.
        """
        if self._link is None:
            return
        self._begun = True
        described = engine.messages.read("described") is not None
        if not described and (trains or description.read(engine.run_dir) is None):
            description.write(run_of(engine))
            engine.messages.provide("described", lambda: True)
        if Cursor.load(engine.run_dir, self.name) is None:  # for `sync.py`, should the follower never come to it
            with suppress(OSError):  # a full disk, which the follower complains of
                Cursor(self.kind, masked(self._options)).save(engine.run_dir, self.name)
        self._link.begin()

    def _finish(self, engine: Engine) -> None:
        if self._link is None:
            return
        if self._logged and not self._begun:  # a validation or test on its own
            self._begin(engine, trains=False)
        self._link.finish(_ending(engine))

    def _summary(self, run_dir: Path, trouble: str | None) -> str:
        cursor, total = Cursor.load(run_dir, self.name), count(self._log)
        sent = 0 if cursor is None else cursor.sent
        text = f"{sent:,} of {total:,} records sent"
        if cursor is not None and cursor.refused:
            text += f", {len(cursor.refused):,} refused"
        if cursor is not None and cursor.finished and cursor.index == total:
            return f"{text}, {cursor.where}" if cursor.where else text
        why = "" if trouble is None else f" ({mask_text(trouble)})"
        return f"{text}{why}; {_command(run_dir)} sends the rest"


def _command(run_dir: Path) -> str:
    """The command that sends what is left: the project's own script where it has one."""
    script = Path("scripts", "sync.py")
    return f"python {script if script.exists() else '-m hydraloop.tracking.sync'} {shown(run_dir)}"


def _ending(engine: Engine) -> Finish:
    """How the run has ended; a validation or test on its own leaves that as it was."""
    if engine.result is not None:
        return description.finish_of(engine.result.status, engine.result.error)
    run = description.read(engine.run_dir)
    before = None if run is None else description.ending(engine.run_dir, run.attempt)
    if before is not None and (before.status != "killed" or engine.messages.read("described") is None):
        return before
    error = engine.error
    return description.finish_of("finished" if error is None else "failed", None if error is None else describe(error))
