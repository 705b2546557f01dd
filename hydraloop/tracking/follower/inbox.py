"""Inbox: messages of the training process to a follower, and the follower's deadline."""

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
"""Exit code if something was not sent in time."""
MARGIN = 1.0
"""Seconds after `flush_timeout` at which the process is killed, whatever hangs."""
_LOOK = 0.5
"""Seconds between two checks whether the training process is still running."""


class Inbox:
    """Reads lines of JSON from the training process. Their end, or the end of that process, counts as the run's end.

    `flush_timeout` seconds are left from then on; the process is killed if a call hangs longer. A thread reads, so
    that this time starts when the run ends, whatever else this process is doing.
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
        """Whether the run has ended."""
        return self._deadline is not None

    @property
    def late(self) -> bool:
        """Whether the time for the rest is over."""
        return self._deadline is not None and monotonic() >= self._deadline

    def settings(self) -> dict[str, Any] | None:
        """Wait for the first message. Returns None if the run ends before it."""
        return self._next()

    def begins(self) -> bool:
        """Wait for `begin`. Returns False if the run ends before it."""
        return self._next() is not None

    def wait(self, seconds: float) -> None:
        """Wait `seconds`, but at most until the run ends, or, after that, until the deadline."""
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
        """Read the messages; runs in the thread."""
        rest = b""  # os.read instead of sys.stdin, whose buffer `select` does not see
        while not self.ended:
            readable, _, _ = select.select([0], [], [], _LOOK)
            read = os.read(0, 1 << 16) if readable else b""
            # A forked worker of a loader may hold the pipe open after the training process has exited.
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
    """End this process at once, and the processes that a library has started (wandb-core), which may hang, too."""
    with suppress(psutil.Error):
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                process.kill()
    os._exit(LEFT)
