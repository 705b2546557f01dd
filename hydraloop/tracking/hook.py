"""TrackerHook: what the hooks mlflow, wandb and tensorboard have in common. It starts a follower and ends it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hydraloop.engine.hook import Hook, Priority
from hydraloop.engine.result import describe
from hydraloop.engine.summary import shown
from hydraloop.errors import UserError
from hydraloop.masking import mask_text
from hydraloop.tracking import description
from hydraloop.tracking.cursor import Cursor
from hydraloop.tracking.describing import run_of
from hydraloop.tracking.link import Link, Settings
from hydraloop.tracking.record_log import count

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine


class TrackerError(Exception):
    """A tracker does not work, and its `on_error` says that this matters."""


class TrackerHook(Hook):
    """A view of the run's records at a tracking service.

    The training thread does nothing for a record: the `logger` hook has written it to `metrics.jsonl`, and a follower,
    a process of its own, reads it there and sends it, in batches, about once a second. What is down, slow or killed
    there costs training nothing; what was not sent when the run ends is sent by `sync.py`.

    Args:
        flush_timeout: seconds that the rest may take after the run's end, at least 0.
        options: of the subclass, as plain JSON.

    Raises:
        UserError: a negative `flush_timeout`.
    """

    kind: ClassVar[str]
    """Which tracker (`kinds.py`)."""
    priority = Priority.VERY_LOW
    runs_after = ("logger",)
    on_error = "warn"
    rank_zero_only = True

    def __init__(self, *, flush_timeout: float, options: Mapping[str, Any]) -> None:
        if not flush_timeout >= 0:
            raise UserError(f"{flush_timeout} is negative", key="flush_timeout", remedy="Use seconds, 0 or more.")
        self._flush_timeout, self._options = flush_timeout, {**options, "flush_timeout": flush_timeout}
        self._link: Link | None = None
        self._log = Path()
        self._begun = self._strict = False

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
        self._log, self._begun = path, False
        self._strict = engine.stages.on_error(self.name) != "warn"
        settings = Settings(self.kind, self._options, self._log.name, self._flush_timeout)
        self._link = Link(engine.run_dir, self.name, settings, goes_on=not engine.stages.may_only_raise(self.name))
        self._link.start()

    def before_train(self, engine: Engine) -> None:
        """Let the follower begin: where the run goes on is known, and the log has been cut there.

        Raises:
            UserError: `on_error=raise`, and the service does not open the run within `flush_timeout`.
        """
        self._begin(engine)
        link = self._link
        if engine.stages.may_only_raise(self.name) and link is not None and not link.until_opened(self._flush_timeout):
            raise UserError(
                link.trouble or f"no answer within {self._flush_timeout:g} s",
                key=self.key,
                remedy=f"See to it, or train without waiting for it: {self.key}.on_error=warn",
            )

    def on_log(self, engine: Engine, record: Mapping[str, Any]) -> None:
        """Nothing, as long as all is well: the record is in the log already.

        Raises:
            TrackerError: it does not work, and `on_error` is not `warn`.
        """
        if not self._begun:  # a validation or test on its own
            self._begin(engine)
        if self._strict and self._link is not None and self._link.trouble is not None:
            raise TrackerError(self._link.trouble)

    def after_run(self, engine: Engine) -> None:
        """Send the rest, in bounded time, and say in the summary how many records arrived.

        All trackers of the run are told to finish before the first is waited for: together they take no longer than
        the slowest.
        """
        for hook in engine.hooks.values():
            if isinstance(hook, TrackerHook):
                hook._finish(engine)
        if self._link is not None:
            self._link.wait()
            summary = self._summary(engine.run_dir, self._link.trouble)
            self._link = None
            told = {**(engine.messages.read("tracked") or {}), self.name: summary}
            engine.messages.provide("tracked", lambda: told)

    def _begin(self, engine: Engine) -> None:
        """Let the follower open the run, which is described once an engine, for all its trackers."""
        self._begun = True
        if engine.messages.read("described") is None:
            description.write(run_of(engine))
            engine.messages.provide("described", lambda: True)
        if self._link is not None:
            self._link.begin()

    def _finish(self, engine: Engine) -> None:
        if self._link is None:
            return
        result = engine.result
        status = ("finished" if engine.error is None else "failed") if result is None else result.status
        error = None if engine.error is None else describe(engine.error)
        self._link.finish(description.finish_of(status, error))

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
