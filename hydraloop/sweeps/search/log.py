"""`search.jsonl` in the directory of a sweep: each decision of a search, and what it was based on, in order.

It has one writer at a time, which has the lock `.search`. Each line is an event of `History`. What a job has done is in
its own files; the log tells what the search knew of it when it decided.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydraloop.errors import UserError
from hydraloop.run_files.config_yaml import plain
from hydraloop.run_files.lock import RunLock
from hydraloop.sweeps.search.history import Event, History

FILENAME = "search.jsonl"
LOCK = ".search"
"""A folder with the lock of the process that decides."""
_POLL = 0.05
"""Seconds between two attempts to acquire that lock."""


class SearchLog:
    """The log of a search, and the history until its last line that was read.

    Args:
        folder: of the sweep.
        repeats: the jobs of a trial.
    """

    def __init__(self, folder: Path, repeats: int) -> None:
        self._path = folder / FILENAME
        self._lock = RunLock(folder / LOCK, key="sweep")
        self._offset = self._line = 0
        self.history = History(repeats)
        self.begin: Event = {}
        """The last event with the space and the settings."""

    def refresh(self) -> None:
        """Read what other processes have written. A line without an end is left: its writer was killed, or writes it.

        Raises:
            UserError: the file is damaged.
        """
        for _ in self.events():
            pass

    def events(self) -> Iterator[Event]:
        """Yield each new event before it is added to the history. Errors: as of `refresh`."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            file.seek(self._offset)
            while (line := file.readline()).endswith(b"\n"):
                event = self._parsed(line)
                yield event
                self._add(event, line)

    def _parsed(self, line: bytes) -> Event:
        try:
            event: Event = json.loads(line)
        except ValueError as error:
            raise self.damaged() from error
        return event

    def _add(self, event: Event, line: bytes) -> None:
        try:
            self.history.apply(event)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, AssertionError) as error:
            raise self.damaged() from error
        if event["event"] == "begin":
            self.begin = event
        self._offset += len(line)
        self._line += 1

    def damaged(self) -> UserError:
        """Return the error that the next line cannot be read."""
        remedy = "Copy that file again, or start a new search."
        return UserError(f"line {self._line + 1} of {self._path} is damaged", key="sweep.resume", remedy=remedy)

    @contextmanager
    def deciding(self, *, patience: float = 0.0) -> Iterator[bool]:
        """In the body, be the one that decides, with all events read. Yields False if another process is.

        Args:
            patience: seconds to wait for that process.
        """
        until = time.monotonic() + patience
        while self._lock.try_acquire() is not None:
            if time.monotonic() >= until:
                yield False
                return
            time.sleep(_POLL)
        try:
            self.refresh()
            yield True
        finally:
            self._lock.release()

    def append(self, *events: dict[str, Any], flush: bool = False) -> None:
        """Write events, and add them to the history. Only in the body of `deciding`.

        Args:
            flush: wait until they are on the disk.

        Raises:
            OSError: they cannot be written.
        """
        lines = [json.dumps(plain(event), allow_nan=False) + "\n" for event in events]
        handle = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            os.ftruncate(handle, self._offset)  # removes a line without an end
            os.lseek(handle, self._offset, os.SEEK_SET)
            content = "".join(lines).encode()
            written = os.write(handle, content)
            if written != len(content):
                os.ftruncate(handle, self._offset)
                raise OSError(28, "No space left on device")
            if flush:
                os.fsync(handle)
        finally:
            os.close(handle)
        for line in lines:
            self._add(json.loads(line), line.encode())
