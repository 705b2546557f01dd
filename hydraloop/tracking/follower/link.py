"""Link: the training side of a follower. It starts the process, reads its messages in a thread, and ends it in time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

from hydraloop.run.environment import shown
from hydraloop.safety.allowlist import ALLOWLIST
from hydraloop.safety.secrets import mask_text, masked, secret_names
from hydraloop.tracking.follower.child import Child
from hydraloop.tracking.follower.inbox import LEFT, MARGIN
from hydraloop.tracking.follower.locks import FOLDER
from hydraloop.tracking.follower.spawning import spawn
from hydraloop.tracking.tracker import Finish

log = logging.getLogger(__name__)

_PAUSES = (0.0, 1.0, 2.0, 4.0, 8.0)
"""Seconds before each restart of a follower that has died. Then it is given up."""
_LONGEST = 4000
"""Most characters of the run's error that a follower is sent."""
_TRAINING_CONTINUES = "; training continues, the records stay in the run directory"


@dataclass(frozen=True, slots=True)
class Settings:
    """What a follower is sent first."""

    kind: str
    """Dotted path of the tracker."""
    options: Mapping[str, Any]
    """The hook's options. They may contain a password, so they are sent through a pipe and not written to disk."""
    flush_timeout: float
    """Seconds that the follower has after the run's end."""


class Link:
    """Starts a follower, restarts it if it dies, logs its messages, and ends it in time.

    Only `until_opened` and `wait` wait, in bounded time. A process that dies before `begin` is restarted at `begin`.

    Args:
        run_dir: directory of the run.
        name: name of the tracker hook, for messages.
        settings: what the follower is sent first.
        training_continues: whether training continues if the follower fails.
    """

    def __init__(self, run_dir: Path, name: str, settings: Settings, *, training_continues: bool = True) -> None:
        self._run_dir, self._name, self._settings = run_dir, name, settings
        self._suffix = _TRAINING_CONTINUES if training_continues else ""
        self._errors = run_dir / FOLDER / f"{name}.log"
        self._child: Child | None = None
        self._begun = self._warned = self._given_up = self._over = False
        self._told: dict[str, Any] | None = None
        """The message that says how the run ended; None until then."""
        self._deadline = 0.0
        self._changed = threading.Condition()
        """Held while the process is replaced or sent a message, so that no message is lost."""
        self.trouble: str | None = None
        """What does not work now; None if everything works."""
        self.opened = False
        """Whether the service has opened the run."""
        self._thread = threading.Thread(target=self._run, name=f"follower of {name}", daemon=True)

    def start(self) -> None:
        """Start the process, which imports its library while the run is prepared."""
        self._thread.start()

    def begin(self) -> None:
        """Let the follower open the run. Called when the run is described and its log is cut."""
        with self._changed:
            self._begun = True
            if self._child is not None:
                self._child.tell({"say": "begin"})
            self._changed.notify_all()

    def until_opened(self, seconds: float) -> bool:
        """Wait until the service has opened the run or there is trouble. Returns whether the run is open."""
        with self._changed:
            self._changed.wait_for(lambda: self.opened or self.trouble is not None, timeout=seconds)
        return self.opened

    def finish(self, finish: Finish) -> None:
        """Tell the follower how the run ended. It has `flush_timeout` seconds from now. Later calls have no effect."""
        with self._changed:
            if self._told is not None:
                return
            error = finish.error
            if error is not None and len(error) > _LONGEST:
                finish = replace(finish, error=error[:_LONGEST] + "…")
            self._told, self._deadline = {"finish": asdict(finish)}, monotonic() + self._settings.flush_timeout
            if self._child is not None:
                self._child.tell(self._told)
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until the follower has ended, at most until its deadline, then kill it."""
        self._thread.join(timeout=max(0.0, self._deadline + MARGIN + 0.5 - monotonic()))
        self.stop()
        self._thread.join(timeout=1.0)  # a process that waits for a broken disk cannot be killed

    def stop(self) -> None:
        """Kill the follower now."""
        with self._changed:
            self._over = True
            if self._child is not None:
                self._child.kill()
            self._changed.notify_all()

    def _run(self) -> None:
        """Start the follower, and restart it if it dies early; runs in the thread."""
        problem = self._follow()
        for pause in _PAUSES:
            if problem is None:
                return
            self._warn(f"{problem} and is restarted", suffix="" if self._ends else self._suffix)
            with self._changed:
                self._changed.wait_for(lambda: self._begun or self._ends)
                self._changed.wait_for(lambda: self._ends, timeout=pause)
                if self._over or not self._begun:
                    return
            problem = self._follow()
        if problem is not None:
            self._give_up(f"{problem} again and is given up, see {shown(self._errors)}")

    @property
    def _ends(self) -> bool:
        return self._over or self._told is not None

    def _follow(self) -> str | None:
        """Run one process from its start to its end. Returns what happened if it ended early."""
        try:
            child = self._start()
        except OSError as error:
            return f"its process could not be started ({error})"
        for message in child.messages():
            self._hear(message)
        code = child.ended()
        problem = f"its process ended ({f'signal {-code}' if code < 0 else f'exit code {code}'})"
        with self._changed:
            self._child = None
            if self._over or self._given_up or (self._told is not None and code in (0, LEFT)):
                return None
        return problem

    def _start(self) -> Child:
        """Start a process and send it all messages up to now."""
        settings = self._settings
        first = {
            "kind": settings.kind,
            "options": dict(settings.options),
            "masked": masked(dict(settings.options)),
            "flush_timeout": settings.flush_timeout,
            "secrets": secret_names(),
            "folders": ALLOWLIST.folders,
            "trusted": ALLOWLIST.packages,
        }
        if not self._run_dir.is_dir():  # `spawn` would create an empty one
            raise FileNotFoundError(f"{self._run_dir} is gone")
        process = spawn("hydraloop.tracking", str(self._run_dir.absolute()), self._name, errors=self._errors)
        child = Child(process, self._name)
        with self._changed:
            for message in (first, {"say": "begin"} if self._begun else None, self._told):
                if message is not None:
                    child.tell(message)
            if self._over:
                child.kill()
            self._child = child
        return child

    def _hear(self, message: Mapping[str, Any]) -> None:
        kind, text = message.get("kind"), mask_text(str(message.get("text", "")))
        with self._changed:
            if kind == "opened":
                self.opened = True
            elif kind == "trouble":
                self.trouble, self._given_up = text, bool(message.get("final"))
            elif kind == "well":
                self.trouble = None
            self._changed.notify_all()
        if kind == "trouble":
            self._warn(text, suffix=self._suffix)
        elif kind == "well":
            log.info("%s: works again", self._name)
        elif kind == "remark":
            log.warning("%s: %s", self._name, text)

    def _give_up(self, problem: str) -> None:
        with self._changed:
            self.trouble = problem
            self._changed.notify_all()
        log.warning("%s: %s%s", self._name, mask_text(problem), self._suffix)

    def _warn(self, text: str, *, suffix: str) -> None:
        """Log a warning; after the first one of a run, at level INFO."""
        level = logging.INFO if self._warned else logging.WARNING
        self._warned = True
        log.log(level, "%s: %s%s", self._name, mask_text(text), suffix)
