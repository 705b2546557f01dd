"""Child: the follower's process as seen by the training process."""

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
    """Exchanges lines of JSON with a process.

    A thread writes the messages. Otherwise, a process that hangs or was stopped would block the caller as soon as the
    pipe's 64 KiB are full.
    """

    def __init__(self, process: subprocess.Popen[bytes], name: str) -> None:
        self._process = process
        self._said: SimpleQueue[Mapping[str, Any] | None] = SimpleQueue()
        threading.Thread(target=self._write, name=f"to the follower of {name}", daemon=True).start()

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send a message. Never waits."""
        self._said.put(message)

    def messages(self) -> Iterator[Mapping[str, Any]]:
        """Yield the process's messages until it exits."""
        assert self._process.stdout is not None, "it is a pipe"
        with self._process.stdout as lines:
            for line in lines:
                with suppress(ValueError):  # an incomplete line: the process was killed while it wrote
                    yield json.loads(line)

    def ended(self) -> int:
        """Wait until the process exits. Returns the exit code."""
        code = self._process.wait()
        self._said.put(None)
        return code

    def kill(self) -> None:
        """Kill the process and all that it has started (its session). Does not wait."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _write(self) -> None:
        """Write the messages; runs in the thread."""
        assert self._process.stdin is not None, "it is a pipe"
        with suppress(OSError), self._process.stdin as pipe:  # the process has exited, which `ended` reports
            while (message := self._said.get()) is not None:
                left = memoryview(json.dumps(message).encode() + b"\n")
                while left:
                    left = left[os.write(pipe.fileno(), left) :]
