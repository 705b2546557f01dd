"""AlertHook: tells you when a condition holds, when no better value comes, and when the run ends."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from hydraloop.condition import Condition
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Priority
from hydraloop.engine.settings import seconds_of
from hydraloop.errors import UserError
from hydraloop.option_checks import check_choice
from hydraloop.safety.secrets import mask_text, remember
from hydraloop.tracking.alert import check_address
from hydraloop.tracking.alert_log import AlertLog
from hydraloop.tracking.hook import TrackerHook
from hydraloop.tracking.link import Link
from hydraloop.tracking.tracker import ALERT

_ENDS = ("finished", "failed", "interrupted")
_VARIABLE = re.compile(r"\w*ALERT\w*")
"""Other variables are for other purposes: a config file could have the editor run, or send to a database."""


class AlertHook(TrackerHook):
    """Tells you when a condition holds, when no better value has come for long, and when the run has ended.

    `python -m hydraloop status <run>` shows all alerts. `notify_command` runs a command with the text as its last
    argument, without a shell. `webhook` sends the text to Slack, Discord, ntfy or another service (package `apprise`).
    Both are secrets: they are typed, or are in an environment variable. A config file can only name the variable.

    A separate process, the sender, reads the records in `metrics.jsonl`, and tells. So training never waits. Each alert
    is told once, also in a resumed run. Secrets in the text are masked.

    Priority VERY_LOW, as of trackers: other hooks' records of an iteration come first. Runs on rank 0 only. No host
    sync, and nothing in an iteration. No state. Options: `AlertHookConf`.

    Raises:
        UserError: `when` is not a condition, `patience` is not a time, `on_end` has another word, or an environment
            variable has no ALERT in its name.
    """

    kind = ALERT
    shares_sender = True
    priority = Priority.VERY_LOW
    runs_after = ("logger",)

    def __init__(
        self,
        *,
        when: str | None = None,
        patience: str | float | None = None,
        on_end: Sequence[str] = _ENDS,
        webhook: str | None = None,
        webhook_env: str | None = None,
        notify_command: str | Sequence[str] | None = None,
        notify_command_env: str | None = None,
        flush_timeout: float = 10.0,
    ) -> None:
        if when is not None:
            Condition(when, None, key="when", example="'hooks.alert.when=\"loss > 10\"'")
        for end in on_end:
            check_choice(_ENDS, on_end=end)
        for key, name in {"webhook_env": webhook_env, "notify_command_env": notify_command_env}.items():
            if name is not None and _VARIABLE.fullmatch(name) is None:
                raise UserError(f"{name} has no ALERT in its name", key=key, remedy="Name it such as MY_ALERT.")
        self._channels = {
            "webhook": (webhook, webhook_env),
            "notify_command": (notify_command, notify_command_env),
        }
        options = {
            "when": when,
            "patience": None if patience is None else seconds_of(patience, "patience"),
            "on_end": list(on_end),
        }
        super().__init__(flush_timeout=flush_timeout, options=options)

    def before_run(self, engine: Engine) -> None:
        """Start the sender.

        Raises:
            UserError: an environment variable is not set, the address is not that of a service, apprise is not
                installed, or no metric says what a better value is.
        """
        webhook, command = (self._given(key) for key in self._channels)
        words = self._words(command)
        remember({"webhook": webhook, "notify_command": [command, *words]})
        if webhook is not None:
            check_address(str(webhook), f"{self.key}.webhook")
        monitor: tuple[str, bool] | None = engine.messages.read("monitor")
        if monitor is None and self._options["patience"] is not None:
            problem = "no metric says which values are better"
            remedy = "Name one: default_hooks.checkpoint.save_best=loss"
            raise UserError(problem, key=f"{self.key}.patience", remedy=remedy)
        metric, higher = monitor or (None, False)
        self._options |= {"name": self.name, "metric": metric, "higher": higher}
        self._options |= {"webhook": webhook, "notify_command": words}
        super().before_run(engine)

    def _given(self, key: str) -> str | Sequence[str] | None:
        """Return an option, or what its environment variable has."""
        value, variable = self._channels[key]
        if value is not None or variable is None:
            return value
        if not os.environ.get(variable):
            problem = f"the environment variable {variable} is not set"
            raise UserError(problem, key=f"{self.key}.{key}_env", remedy=f"Begin the command with {variable}='…'")
        return os.environ[variable]

    def _words(self, command: str | Sequence[str] | None) -> list[str]:
        key, problem = f"{self.key}.notify_command", "there is no such program"
        try:
            words = shlex.split(command) if isinstance(command, str) else [str(word) for word in command or ()]
        except ValueError as error:
            words, problem = [""], f"it is not a command: {error}"
        if words and shutil.which(words[0]) is None:
            raise UserError(problem, key=key, remedy="Write the path of a program, and its arguments.")
        return words

    def _summary(self, run_dir: Path, link: Link) -> str:
        count = len(AlertLog(run_dir, self.name).alerts)
        why = link.trouble or link.died
        return f"{count} alert{'' if count == 1 else 's'}" + ("" if why is None else f" ({mask_text(why)})")
