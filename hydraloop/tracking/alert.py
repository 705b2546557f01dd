"""AlertTracker: tells people of what happens in a run, from the sender's process. Does not import torch."""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any
from urllib.parse import parse_qs, urlsplit

from hydraloop.condition import Condition
from hydraloop.engine.report.formats import clock
from hydraloop.errors import UserError, not_installed
from hydraloop.run_files.record_log import Record
from hydraloop.safety.secrets import mask_text
from hydraloop.tracking.alert_log import AlertLog
from hydraloop.tracking.tracker import Finish, Run, Tracker, UnusableError

log = logging.getLogger(__name__)

_NAMES = """
    bark barks dingtalk discord feishu form forms gchat gotify gotifys guilded hassio hassios ifttt json jsons lark line
    mailgun mailto mailtos matrix matrixs mmost mmosts ntfy ntfys opsgenie pagerduty pbul pover prowl pushy revolt
    rocket rockets sendgrid signal signals signl4 slack ses sns splunk tgram twilio victorops webex wecombot workflow
    workflows wxteams xml xmls zulip
"""
_SERVICES = frozenset(_NAMES.split())
"""Apprise's names of services to which a message is sent over the network. Its others show messages on this machine,
write to its log, run commands or send to devices."""
_FILES = {"attach", "template", "pgp", "pgpkey", "keyfile"}
"""Parameters of an address that could name a file of this machine."""
_LONGEST = 60.0
"""Seconds that a command may take."""
_ENDS = {"stopped": "finished", "killed": "interrupted"}
"""How a run ended, for `on_end`."""


class AlertTracker(Tracker):
    """Sends each alert once: the condition holds, no better value has come for long, or the run has ended.

    An alert is written to `AlertLog` before a channel is told. So an alert is not repeated if this process is killed
    while it tells, which then may have been in vain. If a service does not take it, it is told later.
    """

    def __init__(self, options: dict[str, Any], run: Run, memory: dict[str, Any]) -> None:
        super().__init__(options, run, memory)
        when = options["when"]
        self._condition = None if when is None else Condition(when, None, key="when")
        self._log = AlertLog(run.run_dir, options["name"])
        self._service: Any = None
        self._channels: dict[str, Callable[[str], None]] = {}
        if options["notify_command"]:
            self._channels["command"] = self._run
        if options["webhook"]:
            self._channels["webhook"] = self._post

    def open(self) -> None:
        """Find the service of the address.

        Raises:
            UnusableError: there is none.
        """
        if self.options["webhook"]:
            self._service = _service_of(self.options["webhook"])

    def send(self, records: Sequence[Record]) -> None:
        """Look at records. After an error, the same records may come again."""
        for record in records:
            self._see(record)

    def send_file(self) -> bool:
        """Look at the clock, once a second: there may be no record for long."""
        since = max(self.memory.get("best_at", 0.0), self.run.attempt.began)
        patience, is_over = self.options["patience"], self.memory.get("ended") == self.run.attempt.number
        if patience is not None and not is_over and time.time() - since > patience:
            best = "none yet" if "best" not in self.memory else f"{self.memory['best']:.6g}"
            told = f"no better {self.options['metric']} for {clock(patience)}; the best is {best}"
            self._alert(f"patience since {since}", told)
        return False

    def finish(self, finish: Finish) -> None:
        """Say how the run has ended."""
        self.memory["ended"] = number = self.run.attempt.number
        if _ENDS.get(finish.status, finish.status) in self.options["on_end"]:
            error = (finish.error or "").partition("\n")[0]
            self._alert(f"end of attempt {number}", f"{finish.status}: {error}" if error else finish.status)

    def _see(self, record: Record) -> None:
        values = {**record.values, "epoch": record.epoch, "iteration": record.iteration}
        named = {**values, **{f"{record.mode}.{name}": value for name, value in record.values.items()}}
        metric, higher = self.options["metric"], self.options["higher"]
        if record.mode == "val" and metric in record.values:
            value, best = record.values[metric], self.memory.get("best")
            if value == value and (best is None or (value > best if higher else value < best)):
                self.memory |= {"best": value, "best_at": record.timestamp}
        if self._condition is not None and self._condition.names.keys() & named.keys():
            self._check(self._condition, named, record.iteration)

    def _check(self, condition: Condition, named: Mapping[str, float], iteration: int) -> None:
        """Evaluate the condition with the newest number of each name."""
        seen = {**self.memory.get("seen", {}), **{name: named[name] for name in condition.names if name in named}}
        self.memory["seen"] = seen
        missing = dict.fromkeys(condition.names, float("nan"))  # each comparison with it is false
        try:
            holds = condition.holds({**missing, **seen}, [f"iteration={iteration}"])
        except UserError as error:
            raise UnusableError(error.problem) from error
        if holds:
            when, found = self.options["when"], ", ".join(f"{name} {value:.6g}" for name, value in seen.items())
            self._alert(f"when {when}", f"{when}, at iteration {iteration}: {found}")

    def _alert(self, event: str, told: str) -> None:
        """Tell all channels that were not told of an event."""
        text = mask_text(f"hydraloop: {self.run.experiment} {self.run.name}: {told}")
        for channel in self._log.begin(event, text, list(self._channels)):
            self._log.note(event, channel, told=True)
            try:
                self._channels[channel](self._log.alerts[event]["text"])
            except BaseException:
                self._log.note(event, channel, told=False)
                raise

    def _run(self, text: str) -> None:
        null = subprocess.DEVNULL
        try:
            command = [*self.options["notify_command"], text]
            subprocess.run(command, stdin=null, stdout=null, stderr=null, timeout=_LONGEST, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            why = error.returncode if isinstance(error, subprocess.CalledProcessError) else type(error).__name__
            log.warning("the command has failed: %s", why)  # not the error, which has the command

    def _post(self, text: str) -> None:
        assert self._service is not None, "set in open"
        if not self._service.notify(body=text, title=""):
            raise ConnectionError("the service has not taken the message")


def check_address(address: str, key: str) -> None:
    """Refuse an address that is not that of a service on the network, and one without Apprise. Does not import it.

    Raises:
        UserError: see above.
    """
    if find_spec("apprise") is None:
        raise not_installed("apprise", key=key)
    parts = urlsplit(address)
    if parts.scheme not in (*_SERVICES, "https") or parse_qs(parts.query).keys() & _FILES:
        remedy = "Write one that Apprise knows, without files: slack://…, discord://…, ntfys://ntfy.sh/topic, https://…"
        raise UserError("it is not the address of a service that takes messages", key=key, remedy=remedy)


def _service_of(address: str) -> Any:
    """Return Apprise's object for an address. It loads no plug-ins of others, config files or templates.

    Raises:
        UnusableError: Apprise cannot use the address.
    """
    from apprise import Apprise, AppriseAsset  # it imports all of its services

    asset = AppriseAsset(plugin_paths=[], storage_mode="memory", allow_templates=False, async_mode=False)
    found: Any = Apprise.instantiate(address, asset=asset)
    if not found or not found.schemas() & _SERVICES:
        raise UnusableError("Apprise does not know a service of the address in `webhook`")
    found.request_rate_per_sec = 0  # the follower pauses; killed while Apprise does, an alert would count as told
    return found
