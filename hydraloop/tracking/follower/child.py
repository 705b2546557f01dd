"""Child: a follower's process, as its training process talks to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from queue import SimpleQueue
from typing import Any


class Child:
    """Lines of JSON to a process and from it.

    What is said to it is written by a thread: a process that does not read, since it hangs or was stopped, would hold
    up whoever writes more than the pipe's 64 KiB.
    """

    def __init__(self, process: subprocess.Popen[bytes], name: str) -> None:
        self._process = process
        self._said: SimpleQueue[Mapping[str, Any] | None] = SimpleQueue()
        threading.Thread(target=self._write, name=f"to the follower of {name}", daemon=True).start()

    def tell(self, message: Mapping[str, Any]) -> None:
        """Say something. Never waits."""
        self._said.put(message)

    def heard(self) -> Iterator[Mapping[str, Any]]:
        """What it says, until it has ended."""
        assert self._process.stdout is not None, "it is a pipe"
        with self._process.stdout as lines:
            for line in lines:
                with suppress(ValueError):  # torn: it was killed while it spoke
                    yield json.loads(line)

    def ended(self) -> int:
        """Wait for its end. Returns the exit code."""
        code = self._process.wait()
        self._said.put(None)
        return code

    def kill(self) -> None:
        """End it, and what it has started: its session is its own. Does not wait."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _write(self) -> None:
        """The thread."""
        assert self._process.stdin is not None, "it is a pipe"
        with suppress(OSError), self._process.stdin as pipe:  # it has ended: whoever listens sees to that
            while (message := self._said.get()) is not None:
                left = memoryview(json.dumps(message).encode() + b"\n")
                while left:
                    left = left[os.write(pipe.fileno(), left) :]
