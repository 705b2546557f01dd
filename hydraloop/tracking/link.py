"""Link: the training side of a follower. One process and one thread that waits for its messages; nothing else."""

from __future__ import annotations

import json
import logging
import subprocess
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from hydraloop.engine.summary import shown
from hydraloop.masking import mask_text, masked
from hydraloop.tracking.locks import FOLDER
from hydraloop.tracking.process import LEFT, MARGIN
from hydraloop.tracking.spawning import spawn
from hydraloop.tracking.tracker import Finish

log = logging.getLogger(__name__)

_STARTS = 5
"""How often a follower is started again in one run: one that always dies would only take time from training."""
_GOES_ON = "; training goes on, records wait in the run directory"


@dataclass(frozen=True, slots=True)
class Settings:
    """What a follower is told first."""

    kind: str
    options: Mapping[str, Any]
    """The hook's, as they are: they may hold a password, so they go through a pipe, not to disk."""
    log: str
    """Name of the record log in the run directory."""
    flush_timeout: float
    """Seconds after the run's end."""


class Link:
    """Starts a follower, keeps it alive, passes on what it says, and ends it in time.

    Nothing here waits for the service: lines to the follower are short and go into a pipe's buffer.

    Args:
        run_dir: of the run.
        name: of the tracker hook, for messages.
        goes_on: whether training does, whatever is in the way of the follower.
    """

    def __init__(self, run_dir: Path, name: str, settings: Settings, *, goes_on: bool = True) -> None:
        self._run_dir, self._name, self._settings = run_dir, name, settings
        self._goes_on = _GOES_ON if goes_on else ""
        self._errors = run_dir / FOLDER / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._begun = self._warned = self._given_up = False
        self._deadline: float | None = None
        self._changed = threading.Condition()
        self._starting = threading.Lock()
        """Held while the process is another one: nothing is told to one that has gone."""
        self.trouble: str | None = None
        """What does not work now; None where all is well."""
        self.opened = False
        """Whether the service has the run."""
        self._thread = threading.Thread(target=self._listen, name=f"follower of {name}", daemon=True)

    def start(self) -> None:
        """Start the process; it imports its library while the run is being made ready."""
        self._process = self._spawn()
        self._thread.start()

    def begin(self) -> None:
        """The run is described, its log is cut: the follower may open it."""
        self._begun = True
        self._tell({"say": "begin"})

    def until_opened(self, seconds: float) -> bool:
        """Wait until the service has the run, or has refused it, but no longer. Returns whether it has."""
        with self._changed:
            self._changed.wait_for(lambda: self.opened or self.trouble is not None, timeout=seconds)
        return self.opened

    def finish(self, finish: Finish) -> None:
        """The run has ended; the follower has `flush_timeout` seconds from now."""
        with self._starting:
            if self._deadline is None:
                self._deadline = monotonic() + self._settings.flush_timeout
                self._tell({"finish": asdict(finish)})

    def wait(self) -> None:
        """Wait for the follower's end until its time is over, then end it."""
        process = self._process
        if process is None:
            return
        left = (self._deadline or monotonic()) + MARGIN + 0.5 - monotonic()
        try:
            process.wait(timeout=max(left, 0.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        else:
            if process.returncode not in (0, LEFT):
                self._warn(f"its process ended ({_ended(process.returncode)}), see {shown(self._errors)}", goes_on="")
        self._thread.join(timeout=5.0)

    def _spawn(self) -> subprocess.Popen[bytes]:
        process = spawn("hydraloop.tracking", str(self._run_dir.absolute()), self._name, errors=self._errors)
        settings = self._settings
        first = {
            "kind": settings.kind,
            "options": dict(settings.options),
            "masked": masked(dict(settings.options)),
            "log": settings.log,
            "flush_timeout": settings.flush_timeout,
        }
        _write(process, first)
        return process

    def _tell(self, message: Mapping[str, Any]) -> None:
        if self._process is not None:
            _write(self._process, message)

    def _listen(self) -> None:
        """The thread: pass on what the follower says; start it again where it died before its time."""
        starts = 1
        while True:
            process = self._process
            assert process is not None, "it was started before the thread"
            assert process.stdout is not None, "it is a pipe"
            with process.stdout:
                for line in process.stdout:
                    self._hear(json.loads(line))
            code = process.wait()
            with self._starting:
                _close(process)
                if self._deadline is not None or self._given_up or not self._begun:
                    return
                if starts > _STARTS:
                    self._warn(f"its process has ended {starts} times", goes_on=self._goes_on)
                    return
                starts += 1
                self._warn(f"its process ended ({_ended(code)}) and is started again", goes_on=self._goes_on)
                self._process = self._spawn()
                self._tell({"say": "begin"})

    def _hear(self, message: Mapping[str, Any]) -> None:
        with self._changed:
            kind = message["kind"]
            if kind == "opened":
                self.opened = True
            elif kind == "trouble":
                self.trouble, self._given_up = message["text"], message["final"]
            elif kind == "well":
                self.trouble = None
            self._changed.notify_all()
        if kind == "trouble":
            self._warn(message["text"], goes_on=self._goes_on)
        elif kind == "well":
            log.info("%s: goes on", self._name)
        elif kind == "remark":
            log.warning("%s: %s", self._name, message["text"])

    def _warn(self, text: str, *, goes_on: str) -> None:
        """Once a run; later troubles are told more quietly."""
        level = logging.INFO if self._warned else logging.WARNING
        self._warned = True
        log.log(level, "%s: %s%s", self._name, mask_text(text), goes_on)


def _write(process: subprocess.Popen[bytes], message: Mapping[str, Any]) -> None:
    assert process.stdin is not None, "it is a pipe"
    with suppress(OSError, ValueError):  # it has ended: the thread sees to that
        process.stdin.write(json.dumps(message).encode() + b"\n")
        process.stdin.flush()


def _close(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None, "it is a pipe"
    with suppress(OSError):
        process.stdin.close()


def _ended(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
