"""EventFile: a file of TensorBoard events with a known size, so that a write can be repeated."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

_LENGTH = struct.Struct("<Q")
_AROUND = 16
"""Bytes of an event's frame: its length and the length's checksum before the event, and its checksum after it."""


class EventFile:
    """Writes events at a given byte. What the file has after that byte was never confirmed, and is overwritten.

    Writing is therefore idempotent: after an error, or when the process died before it saved its position, the same
    events are written again at the same byte. TensorBoard's `EventFileWriter` cannot do this: it always starts a new
    file, and it uses a thread and a queue. Only its framing, `RecordWriter`, is used.

    Args:
        path: path of the file. Its folder must exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def size(self) -> int:
        """Size in bytes; 0 if the file does not exist."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def write(self, events: Iterable[Any], at: int) -> int:
        """Write events, and flush once.

        Args:
            events: `Event` protos.
            at: byte of the first event, at most `size`. The file ends after the last event.

        Returns:
            The byte after the last event.
        """
        from tensorboard.summary.writer.record_writer import RecordWriter

        with os.fdopen(os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as file:
            file.truncate(at)
            file.seek(at)
            writer = RecordWriter(file)
            for event in events:
                writer.write(event.SerializeToString())
            file.flush()
            return file.tell()

    def cut(self, size: int) -> None:
        """Truncate the file to a size."""
        if self.size > size:
            os.truncate(self.path, size)

    def end_of(self, events: int, *, after: int) -> int:
        """Return the byte after a number of events, or after the last complete one if there are fewer.

        Args:
            after: byte of the first of these events.
        """
        return max(islice(self._ends(after), events), default=after)

    def whole(self, size: int) -> int:
        """Return the byte after the last complete event in the first `size` bytes."""
        return max((end for end in self._ends(0) if end <= size), default=0)

    def _ends(self, start: int) -> Iterator[int]:
        """Yield the byte after each complete event from `start` on. An event's frame begins with its length."""
        size, end = self.size, start
        if not size:
            return
        with self.path.open("rb") as file:
            file.seek(start)
            while len(header := file.read(_LENGTH.size)) == _LENGTH.size:
                end += _AROUND + _LENGTH.unpack(header)[0]
                if end > size:
                    return
                yield end
                file.seek(end)
