"""What the training process says to a process of ours, and when that process has to have ended."""

from __future__ import annotations

import json
import os
import select
import threading
from collections import deque
from contextlib import suppress
from time import monotonic
from typing import Any

import psutil

from hydraloop.tracking.tracker import Finish

LEFT = 3
"""Exit code where something was not sent in time."""
MARGIN = 1.0
"""Seconds after `flush_timeout` at which the process is ended from outside, whatever hangs."""
_LOOK = 0.5
"""Seconds between two looks whether the training process is still there."""


class Inbox:
    """Lines of JSON from the training process. Their end, or the end of that process, ends the run for us.

    From then on there are `flush_timeout` seconds left; a call that hangs longer ends with the process. A thread reads,
    so that the time begins when the run ends, whatever else this process is doing then.
    """

    def __init__(self) -> None:
        self._flush_timeout, self._parent = 0.0, os.getppid()
        self._messages: deque[dict[str, Any]] = deque()
        self._deadline: float | None = None
        self._changed = threading.Condition()
        self.finish: Finish | None = None
        threading.Thread(target=self._read, name="inbox", daemon=True).start()

    @property
    def ended(self) -> bool:
        """Whether the run has."""
        return self._deadline is not None

    @property
    def late(self) -> bool:
        """Whether the time for the rest is over."""
        return self._deadline is not None and monotonic() >= self._deadline

    def settings(self) -> dict[str, Any] | None:
        """Wait for the first line; None where the run ends before it."""
        return self._next()

    def begins(self) -> bool:
        """Wait for `begin`; False where the run ends before it."""
        return self._next() is not None

    def wait(self, seconds: float) -> None:
        """Wait `seconds`, but not beyond the run's end, or, behind that, the end of the time for the rest."""
        with self._changed:
            if self._deadline is None:
                self._changed.wait_for(lambda: self.ended, timeout=seconds)
                return
            left = self._deadline - monotonic()
        threading.Event().wait(max(0.0, min(seconds, left)))

    def _next(self) -> dict[str, Any] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._messages or self.ended)
            return self._messages.popleft() if self._messages else None

    def _read(self) -> None:
        """The thread."""
        rest = b""  # not sys.stdin, whose own buffer `select` does not see
        while not self.ended:
            readable, _, _ = select.select([0], [], [], _LOOK)
            read = os.read(0, 1 << 16) if readable else b""
            # A worker of a loader, forked, may hold the pipe open for a while longer than the training process lives.
            if not read and (readable or os.getppid() != self._parent):
                self._ends(None)
            *lines, rest = (rest + read).split(b"\n")
            for line in lines:
                self._take(json.loads(line))

    def _take(self, message: dict[str, Any]) -> None:
        if "finish" in message:
            self._ends(Finish(**message["finish"]))
            return
        with self._changed:
            self._flush_timeout = message.get("flush_timeout", self._flush_timeout)
            self._messages.append(message)
            self._changed.notify_all()

    def _ends(self, finish: Finish | None) -> None:
        watch = threading.Timer(self._flush_timeout + MARGIN, _leave)
        watch.daemon = True
        watch.start()
        with self._changed:
            self.finish = finish
            self._deadline = monotonic() + self._flush_timeout
            self._changed.notify_all()


def _leave() -> None:
    """End this process at once, and what a library has started for it (W&B's wandb-core), which may hang, too."""
    with suppress(psutil.Error):
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                process.kill()
    os._exit(LEFT)
