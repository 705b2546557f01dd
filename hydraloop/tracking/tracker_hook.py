"""TrackerHook: what the hooks mlflow, wandb and tensorboard have in common. It starts a sender and ends it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hydraloop.engine.hook import Hook, Priority
from hydraloop.errors import UserError, not_installed
from hydraloop.files import lock
from hydraloop.files.metrics_log import FILENAME, count
from hydraloop.files.result import describe
from hydraloop.files.secrets import mask_text, masked
from hydraloop.schemas.option_checks import check_at_least
from hydraloop.tracking import run_description
from hydraloop.tracking.cursor import Cursor, path_of, sync_command
from hydraloop.tracking.start_sender import Sender

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine

log = logging.getLogger(__name__)

_OPENING = 30.0
"""Least seconds to wait for a service that must be available: importing its library alone may take ten."""
_CONTINUES = "; training continues, the records stay in the run directory"
_PERIOD = 0.1
"""Least seconds between two checks of the sender. A check takes 10 µs, which a record does not have."""
_POLL = 0.05
"""Seconds between two looks whether the service has opened the run."""


class TrackerError(Exception):
    """A tracker does not work, and its `on_error` is not `warn`."""


@dataclass(frozen=True, slots=True)
class _Sending:
    """What the trackers of a run share."""

    sender: Sender | None
    """None: the controller of the sweep has one for all jobs."""
    attempt: int
    """Number of the attempt that is described."""
    seconds: float
    """The longest `flush_timeout`."""
    is_new: bool
    """Whether the attempt has begun now. Otherwise, a run is validated or tested separately."""


class TrackerHook(Hook):
    """Sends the run's records to a tracking service.

    The training thread does nothing for a record: the `logger` hook writes it to `metrics.jsonl`. A sender, a
    separate process for all trackers of the run, reads it there and sends it, in batches, about once a second. A
    service that is down or slow does not slow training. `hydraloop sync` sends what was not sent. The jobs of
    a sweep have no senders: the controller has one.

    Args:
        flush_timeout: seconds to send the rest after the run has ended, at least 0.
        options: the subclass's options, as plain JSON.
        interval: the records of every `interval`-th iteration are sent, at least 1. The records of evaluations and
            those that announce objects (pictures, histograms) are always sent.

    Raises:
        UserError: `flush_timeout` is negative, or `interval` is below 1.
    """

    kind: ClassVar[str]
    """Dotted path of the `Tracker` class, which the sender imports. The allowlist must permit it."""
    library: ClassVar[str | None] = None
    """Package that the tracker imports. If it is not installed, a warning before training says so."""
    conflict: ClassVar[str] = ""
    """What two hooks of this class would do in one run, for the error; empty: a run may have several."""
    priority = Priority.VERY_LOW
    runs_after = ("logger",)
    on_error = "warn"
    rank_zero_only = True

    def __init__(self, *, flush_timeout: float, options: Mapping[str, Any], interval: int = 1) -> None:
        check_at_least(0, flush_timeout=flush_timeout)
        check_at_least(1, interval=interval)
        self._flush_timeout = flush_timeout
        self._options = {**options, "flush_timeout": flush_timeout, "interval": interval}
        self._begin_run()

    def _begin_run(self) -> None:
        self._is_used = self._logged = self._warned = False
        self._trouble: str | None = None
        self._logged_remarks: set[str] = set()
        """Remarks in the cursor that were logged."""
        self._cursor_time = 0
        """Modification time of the cursor that was read last."""
        self._next_check = 0.0
        """When a record checks the sender again, on the monotonic clock."""
        self._not_installed: UserError | None = None

    def before_run(self, engine: Engine) -> None:
        """Check that the run has records and that the library is installed.

        Raises:
            UserError: another hook is in `conflict` with it, or the run has no `logger` hook, whose records are sent.
                Or `on_error=raise`, and the library is not installed.
        """
        same = [name for name, other in engine.hooks.items() if type(other) is type(self)]
        if self.conflict and len(same) > 1:
            problem = f"{' and '.join(same)} would {self.conflict}"
            raise UserError(problem, key=self.key, remedy="Remove one of them.")
        if engine.messages.read("record_log") is None:
            raise UserError(
                "it sends the records of default_hooks.logger, which this run does not have",
                key=self.key,
                remedy="Keep the logger, or remove this hook.",
            )
        engine.messages.provide("sending", lambda: None)
        self._begin_run()
        self._is_used = True
        self._cursor_time = _written_at(engine.run_dir, self.name)  # the cursor is that of an earlier attempt
        package = None if self.library is None else find_spec(self.library)
        if self.library is not None and (package is None or package.origin is None):  # not only a folder of this name
            self._not_installed = not_installed(self.library, key=self.key)
            if engine.calls.on_error(self.name) == "raise":
                raise self._not_installed
            self._trouble = f"{self._not_installed.problem}: {self._not_installed.remedy}"
            self._warn(engine, self._trouble)

    def before_train(self, engine: Engine) -> None:
        """Start the sender. The log has been cut to the iteration at which the run resumes.

        Raises:
            UserError: `on_error=raise`, and the service does not open the run within `flush_timeout`, at least 30 s.
        """
        if not self._is_used:
            return
        sending = self._begin(engine, trains=True)
        if engine.calls.on_error(self.name) != "raise":
            return
        patience = max(self._flush_timeout, _OPENING)
        until = time.monotonic() + patience
        while not self._is_open(engine, sending):
            if self._trouble is not None or time.monotonic() >= until:
                raise UserError(
                    self._trouble or f"no answer within {patience:g} s",
                    key=self.key,
                    remedy=f"Fix it, or train without waiting for the service: {self.key}.on_error=warn",
                )
            time.sleep(_POLL)

    def on_log(self, engine: Engine, record: Mapping[str, Any]) -> None:
        """Do nothing while the tracker works: the record is in the log already.

        Raises:
            TrackerError: the tracker does not work, and `on_error` is not `warn`.
        """
        self._logged = True
        sending: _Sending | None = engine.messages.read("sending")
        now = time.monotonic()
        if sending is not None and now >= self._next_check:
            self._next_check = now + _PERIOD
            self._read_cursor(engine, sending)
        if self._trouble is not None and engine.calls.on_error(self.name) != "warn":
            raise TrackerError(self._trouble)

    def after_run(self, engine: Engine) -> None:
        """Send the rest in bounded time, and add the number of records sent, and the time, to the summary.

        The trackers are served together, so they take no longer than the slowest. Ctrl-C ends the waiting and does not
        change the status of the run. A job of a sweep does not wait.
        """
        sending: _Sending | None = engine.messages.read("sending")
        if sending is None and self._logged and self._is_used:  # a separate validation or test
            sending = self._begin(engine, trains=False)
        if sending is None or not self._is_used:
            return
        began = time.monotonic()
        if sending.sender is not None:
            try:
                sending.sender.finish(sending.seconds, **_ending(engine, is_new=sending.is_new))
                sending.sender.wait(sending.seconds)
            except KeyboardInterrupt:  # result.json is written already
                log.warning("interrupted: not waiting for the trackers to send the rest")
                sending.sender.kill()
        waits = {**(engine.messages.read("tracker_waits") or {}), self.name: time.monotonic() - began}
        engine.messages.provide("tracker_waits", lambda: waits)
        if sending.sender is not None and sending.sender.is_late:
            self._trouble = sending.sender.problem  # the summary says it, for trackers that have not sent all records
        else:
            self._read_cursor(engine, sending)
        summary = self._summary(engine.run_dir, sending)
        summaries = {**(engine.messages.read("tracked") or {}), self.name: summary}
        engine.messages.provide("tracked", lambda: summaries)

    def _begin(self, engine: Engine, *, trains: bool) -> _Sending:
        """Describe the run and start its sender. The first tracker does so for all of them.

        A separate validation or test is not an attempt: it leaves an existing description as it is.
        """
        found: _Sending | None = engine.messages.read("sending")
        if found is not None:
            return found
        hooks = [hook for hook in engine.hooks.values() if isinstance(hook, TrackerHook) and hook._is_used]
        trackers = {hook.name: {"kind": hook.kind, "options": masked(hook._options)} for hook in hooks}
        run = run_description.read(engine.run_dir)
        is_new = trains or run is None
        if run is None or trains:
            run = run_description.run_of(engine, trackers)
            run_description.write(run)
        sender = None
        if run.sweep is None or lock.holder(run.sweep.folder) is None:
            hidden = {hook.name: hook._hidden_options for hook in hooks if hook._not_installed is None}
            sender = Sender(engine.run_dir, hidden, engine.messages.read("trust"))
            sender.start()
        sending = _Sending(sender, run.attempt.number, max(hook._flush_timeout for hook in hooks), is_new)
        engine.messages.provide("sending", lambda: sending)
        return sending

    @property
    def _hidden_options(self) -> dict[str, Any]:
        """The options whose values are masked in files."""
        stored = masked(self._options)
        return {key: value for key, value in self._options.items() if value != stored[key]}

    def _is_open(self, engine: Engine, sending: _Sending) -> bool:
        self._read_cursor(engine, sending)
        cursor = Cursor.load(engine.run_dir, self.name)
        return self._trouble is None and cursor is not None and cursor.attempt == sending.attempt

    def _read_cursor(self, engine: Engine, sending: _Sending) -> None:
        """Log what the sender says of this tracker in its cursor."""
        if sending.sender is not None:
            sending.sender.check()
            if sending.sender.problem is not None and self._trouble != sending.sender.problem:
                self._trouble, self._warned = sending.sender.problem, False
                self._warn(engine, self._trouble)
                return
        seen = _written_at(engine.run_dir, self.name)
        if seen == self._cursor_time:
            return
        self._cursor_time, cursor = seen, Cursor.load(engine.run_dir, self.name)
        if cursor is None:
            return
        for remark in cursor.remarks:
            if remark not in self._logged_remarks:
                self._logged_remarks.add(remark)
                log.warning("%s: %s", self.name, mask_text(remark))
        if cursor.trouble is not None and cursor.trouble != self._trouble:
            self._warn(engine, cursor.trouble)
        self._trouble = cursor.trouble

    def _warn(self, engine: Engine, text: str) -> None:
        """Log a warning; after the first one of a run, at level INFO."""
        level, self._warned = logging.INFO if self._warned else logging.WARNING, True
        suffix = "" if engine.calls.on_error(self.name) == "raise" else _CONTINUES
        log.log(level, "%s: %s%s", self.name, mask_text(text), suffix)

    def _summary(self, run_dir: Path, sending: _Sending) -> str:
        cursor, total = Cursor.load(run_dir, self.name) or Cursor(""), count(run_dir / FILENAME)
        text = f"{cursor.sent:,} of {total:,} records sent"
        if self._options["interval"] > 1:
            text += f", without those that interval={self._options['interval']} leaves out"
        if cursor.refused:
            text += f", {len(cursor.refused):,} refused"
        if cursor.complete and cursor.index == total and cursor.attempt == sending.attempt:
            return f"{text}, {cursor.where}" if cursor.where else text
        text += "" if self._trouble is None else f" ({mask_text(self._trouble)})"
        if sending.sender is None:
            return f"{text}; the sweep sends the rest"
        return f"{text}; {sync_command(run_dir, self.kind)} sends the rest"


def _written_at(run_dir: Path, name: str) -> int:
    """Return when a cursor was written, in nanoseconds; 0 if it does not exist."""
    try:
        return path_of(run_dir, name).stat().st_mtime_ns
    except OSError:
        return 0


def _ending(engine: Engine, *, is_new: bool) -> dict[str, Any]:
    """Return how the run ended. A separate validation or test leaves that as it was, in its directory."""
    result, error = engine.outcome.result, engine.error
    if result is not None:
        return asdict(run_description.finish_of(result.status, result.error))
    if not is_new:
        return {}
    if error is None:
        return asdict(run_description.finish_of("finished", None))
    return asdict(run_description.finish_of("failed", describe(error)))
