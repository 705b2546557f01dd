"""Link: the training side of a sender. It starts the process, reads its messages in a thread, and ends it in time."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Any

from hydraloop.run_files.environment import shown
from hydraloop.run_files.processes import started
from hydraloop.safety.allowlist import ALLOWLIST
from hydraloop.safety.secret_names import secret_names
from hydraloop.safety.secrets import mask_text, masked
from hydraloop.tracking.starting import HANGS, LEFT, MARGIN, Sender, log_of
from hydraloop.tracking.tracker import Finish, Sweep

log = logging.getLogger(__name__)

_PAUSES = (0.0, 1.0, 10.0)
"""Seconds before each restart of a sender that has died, for example because memory or the disk was short. Then it is
given up."""
_DELIVERY = 2.0
"""Seconds until the messages are written to a process that is starting, at most."""
Trust = tuple[list[str], list[str]]
"""Folders and packages in which a tracker may be."""
_OF_A_JOB = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
"""Variables that differ between the jobs of a sweep. Trackers do not need them."""
_IMPORT = 60.0
"""Additional seconds for the sender of a sweep. Importing its library takes long on a busy machine."""


def first_message(kind: str, options: Mapping[str, Any], trust: Trust | None = None) -> dict[str, Any]:
    """Return what a sender is told first: through a socket, because the options may contain a password.

    Args:
        trust: the folders and packages in which the tracker may be. None: those that this process trusts now.
    """
    folders, packages = trust or (ALLOWLIST.folders, ALLOWLIST.packages)
    training = (os.getpid(), started(os.getpid()))
    return {
        "kind": kind,
        "options": options,
        "masked": masked(options),
        "flush_timeout": options["flush_timeout"],
        "secrets": secret_names(),
        "folders": folders,
        "trusted": packages,
        "training": training,
        "owner": training,
        "environment": {name: value for name, value in os.environ.items() if name not in _OF_A_JOB},
        "cwd": str(Path.cwd()),
    }


class Link:
    """Starts a sender, restarts it if it dies, logs its messages, and ends it in time.

    Only `until_opened`, `wait` and `leave` wait, in bounded time. After the run's end, the sender has `flush_timeout`
    seconds. If `sweep` is given, this process leaves the sender, for which the controller of the sweep waits.

    Args:
        is_shared: whether the jobs of the sweep share the sender.
    """

    def __init__(
        self,
        run_dir: Path,
        name: str,
        kind: str,
        options: Mapping[str, Any],
        *,
        training_continues: bool = True,
        sweep: Sweep | None = None,
        is_shared: bool = False,
        trust: Trust | None = None,
    ) -> None:
        self.run_dir, self.name = run_dir, name
        self._flush_timeout, self._sweep = options["flush_timeout"], sweep if is_shared else None
        self._suffix = "; training continues, the records stay in the run directory" if training_continues else ""
        self._sender: Sender | None = None
        self._first = {**first_message(kind, options, trust), "run_dir": str(run_dir.absolute()), "name": name}
        if sweep is not None:
            self._first["flush_timeout"] += _IMPORT
        if self._sweep is not None:
            self._first["owner"] = (self._sweep.pid, self._sweep.started)
        self._messages: list[Mapping[str, Any] | None] = [self._first]
        """All messages, for each sender that is started; None after the last one."""
        self._warned = self._over = self._left = False
        self._deadline = 0.0
        self._changed = threading.Condition()
        """Held while the sender is replaced or sent a message, so that no message is lost."""
        self.trouble: str | None = None
        """What does not work now; None if everything works."""
        self.died: str | None = None
        """Why the last sender ended early; None if the service has opened the run since."""
        self.opened = False
        """Whether the service has opened the run."""
        self._thread = threading.Thread(target=self._run, name=f"sender of {name}", daemon=True)

    def start(self) -> None:
        """Start the process, which imports its library while the run is prepared."""
        self._thread.start()

    def refuse(self, problem: str) -> None:
        """Do not start the process, and log why."""
        self.trouble = problem
        self._warn(f"{problem}{self._suffix}")

    def begin(self) -> None:
        """Let the sender open the run. Called when the run is described and its log is cut."""
        self._say({"say": "begin"})

    def until_opened(self, seconds: float) -> bool:
        """Wait until the service has opened the run or there is trouble. Returns whether the run is open."""
        with self._changed:
            self._changed.wait_for(lambda: self.opened or self.trouble is not None, timeout=seconds)
        return self.opened

    def finish(self, finish: Finish) -> None:
        """Tell the sender how the run ended. It has `flush_timeout` seconds from now. Later calls have no effect."""
        with self._changed:
            if not self._told:
                self._deadline = monotonic() + self._flush_timeout
                self._say({"finish": asdict(finish)}, None)

    def wait(self) -> None:
        """Wait until the sender has ended, at most until its deadline, then kill it."""
        if not self.is_alive():
            return
        self._thread.join(timeout=max(0.0, self._deadline + MARGIN + 0.5 - monotonic()))
        if self.is_alive():
            self.stop()
            self._hangs()
        self._thread.join(timeout=1.0)  # a process that waits for a broken disk cannot be killed

    def leave(self) -> None:
        """Let the sender send the rest while this process continues, or exits. It is not restarted."""
        self._left = True
        with self._changed:
            self._changed.wait_for(lambda: self._sender is not None or not self.is_alive(), timeout=_DELIVERY)
            child = self._sender
        if child is not None:
            child.delivered(_DELIVERY)

    def is_alive(self) -> bool:
        """Return whether the sender is running, or is restarted."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Kill the sender now."""
        with self._changed:
            self._over = True
            if self._sender is not None:
                self._sender.kill()
            self._changed.notify_all()

    def _say(self, *messages: Mapping[str, Any] | None) -> None:
        with self._changed:
            self._messages += messages
            if self._sender is not None:
                for message in messages:
                    self._sender.tell(message)
            self._changed.notify_all()

    @property
    def _told(self) -> bool:
        """Whether the sender was told how the run ended."""
        return self._messages[-1] is None

    def _run(self) -> None:
        """Start the sender, and restart it if it dies early; runs in the thread."""
        problem = self._be_served()
        for pause in _PAUSES:
            if problem is not None:
                self.died = problem
                self._warn(f"{problem} and is restarted{'' if self._told else self._suffix}")
                with self._changed:
                    self._changed.wait_for(lambda: self._over or self._told, timeout=pause)
                problem = self._be_served()
        if problem is not None:
            with self._changed:
                self.trouble = f"{problem} again and is given up, see {shown(self._log)}"
                self._warned = False  # the first warning has announced a restart
                self._changed.notify_all()
            self._warn(f"{self.trouble}{self._suffix}")

    def _be_served(self) -> str | None:
        """Talk to one sender from its start to its end. Returns what happened if it ended early."""
        try:
            sender = self._started()
        except OSError as error:
            return f"its process could not be started ({error})"
        with self._changed:
            for message in self._messages:
                sender.tell(message)
            if self._over:
                sender.kill()
            self._sender = sender
            self._changed.notify_all()
        outcome = None
        for message in sender.messages():
            if message["kind"] == "ended":
                outcome = message["code"]
            else:
                self._hear(message)
        code = sender.close()
        outcome = code if outcome is None else outcome
        with self._changed:
            self._sender = None
        if outcome == HANGS:
            self._hangs()
        gives_up = self.trouble is not None  # it has said why
        if self._over or self._left or (outcome in (0, LEFT, HANGS) and (self._told or gives_up)):
            return None
        return self._problem(code)

    def _started(self) -> Sender:
        """Return the sender of the sweep, if jobs share one and that is possible here, else a new one of this run."""
        if self._sweep is not None:
            with suppress(OSError):
                return Sender.of_sweep(self._sweep.folder, self.name, self._first)
            self._sweep = None
        return Sender.of_run(self.run_dir, self.name)

    @property
    def _log(self) -> Path:
        """The file with the output of the sender."""
        return log_of(self.run_dir if self._sweep is None else self._sweep.folder, self.name)

    def _hangs(self) -> None:
        self.trouble = f"no answer within {self._flush_timeout:g} s after the run's end"
        self._warn(self.trouble)

    def _problem(self, code: int | None) -> str:
        """Say why the sender has ended: the signal, or the last line of its log."""
        if code is None:
            return f"its process has ended, see {shown(self._log)},"
        if code < 0:
            return f"its process was killed by {signal.Signals(-code).name}"
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n") if self._log.exists() else []
        last = next((line for line in reversed(lines) if line.strip()), "")
        return f"its process ended with exit code {code}" + (f" ({last.strip()[:300]})" if last else "")

    def _hear(self, message: Mapping[str, Any]) -> None:
        kind, text = message.get("kind"), mask_text(str(message.get("text", "")))
        with self._changed:
            if kind == "opened":
                self.opened, self.died, self.trouble = True, None, None
            elif kind == "trouble":
                self.trouble = text
            elif kind == "well":
                self.trouble = None
            self._changed.notify_all()
        if kind == "trouble":
            self._warn(f"{text}{self._suffix}")
        elif kind in ("well", "remark") and not self._left:
            log.log(logging.INFO if kind == "well" else logging.WARNING, "%s: %s", self.name, text or "works again")

    def _warn(self, text: str) -> None:
        """Log a warning; after the first one of a run, at level INFO; of a run that was left, at level DEBUG."""
        level = logging.DEBUG if self._left else logging.INFO if self._warned else logging.WARNING
        self._warned = True
        log.log(level, "%s: %s", self.name, mask_text(text))
