"""Inbox: what a sender is told by a training process, and what it answers, as lines of JSON.

In: the hook's options; `begin` when the run is described and its log is cut; `finish` when the run has ended. Out: what
is to be logged in the terminal; last, `ended` with the outcome. The end of the input means that the training process
has exited. The sender then sends the rest and closes the run within the same time limit.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hydraloop.run_files.processes import is_alive, started
from hydraloop.tracking.starting import MARGIN
from hydraloop.tracking.tracker import Finish

_LOOK = 0.5
"""Seconds between two checks whether the training process is still running."""


class Inbox:
    """The connection of one run.

    `flush_timeout` seconds are left from the end of the run on. If a call hangs longer, `hangs` is called. A thread
    reads, so that this time starts when the run ends, whatever else this process is doing.
    """

    def __init__(self, connection: socket.socket, hangs: Callable[[Inbox], None]) -> None:
        self._connection, self._hangs = connection, hangs
        self._flush_timeout = 0.0
        self._training = (os.getppid(), started(os.getppid()))
        """The training process. Until the first message, the parent of this process."""
        self._messages: deque[dict[str, Any]] = deque()
        self._deadline: float | None = None
        self._changed = threading.Condition()
        self.finish: Finish | None = None
        self.is_closed = False
        threading.Thread(target=self._read, name="inbox", daemon=True).start()

    @property
    def ended(self) -> bool:
        """Whether the run has ended."""
        return self._deadline is not None

    @property
    def late(self) -> bool:
        """Whether the time for the rest is over."""
        return self._deadline is not None and time.monotonic() >= self._deadline

    def next(self) -> dict[str, Any] | None:
        """Wait for the next message. Returns None if the run ends before it."""
        with self._changed:
            self._changed.wait_for(lambda: self._messages or self.ended)
            return self._messages.popleft() if self._messages else None

    def wait(self, seconds: float) -> None:
        """Wait `seconds`, but at most until the run ends, or, after that, until the deadline."""
        with self._changed:
            if self._deadline is None:
                self._changed.wait_for(lambda: self.ended, timeout=seconds)
            else:
                self._changed.wait(max(0.0, min(seconds, self._deadline - time.monotonic())))

    def say(self, kind: str, **message: Any) -> None:
        """Send a message to the training process, which may have exited."""
        with suppress(OSError):
            self._connection.sendall(json.dumps({"kind": kind, **message}).encode() + b"\n")

    def say_trouble(self, text: str | None) -> None:
        """Say what does not work; None: everything works again."""
        self.say("well" if text is None else "trouble", text=text or "")

    def close(self, code: int | None) -> None:
        """Say how sending the run has ended, and close the connection. None: it has failed."""
        with self._changed:
            if self.is_closed:
                return
            self.is_closed = True
            if code is not None:
                self.say("ended", code=code)
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            self._changed.notify_all()

    def _read(self) -> None:
        """Read the messages until the run has ended, and call `hangs` in time; runs in the thread."""
        rest = b""
        with self._connection:
            while not self.ended:
                readable, _, _ = select.select([self._connection], [], [], _LOOK)
                read = self._received() if readable else b""
                # A forked worker of a loader may hold the socket open after the training process has exited.
                if not read and (readable or not is_alive(*self._training)):
                    self._take({"finish": None})
                *lines, rest = (rest + read).split(b"\n")
                for line in lines:
                    self._take(json.loads(line))
            with self._changed:
                self._changed.wait_for(lambda: self.is_closed, timeout=self._flush_timeout + MARGIN)
            if not self.is_closed:
                self._hangs(self)

    def _received(self) -> bytes:
        with suppress(ConnectionError):  # the training process was killed
            return self._connection.recv(1 << 16)
        return b""

    def _take(self, message: dict[str, Any]) -> None:
        with self._changed:
            if "finish" in message:
                self.finish = None if message["finish"] is None else Finish(**message["finish"])
                self._deadline = time.monotonic() + self._flush_timeout
            else:
                self._messages.append(message)
            if "training" in message:
                self._flush_timeout, self._training = message["flush_timeout"], tuple(message["training"])
            self._changed.notify_all()


class Remarks(logging.Handler):
    """Passes the warnings of the thread that makes it on to the training process of a run."""

    def __init__(self, inbox: Inbox) -> None:
        super().__init__(logging.WARNING)
        self._inbox, self._thread = inbox, threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        """Send the message of a record."""
        if record.thread == self._thread:
            self._inbox.say("remark", text=record.getMessage())
