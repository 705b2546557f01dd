"""EventFile: a file of TensorBoard events that is known to the byte, so that writing to it can be repeated."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

_LENGTH = struct.Struct("<Q")
_AROUND = 16
"""Bytes of an event's frame: its length, the length's checksum, and behind the event its own."""


class EventFile:
    """Events, appended at a place that the caller knows: what lies behind it was never confirmed, and is written over.

    That makes writing idempotent: after an error, or when the process died before it could say how far it came, the
    same events are written again at the same place. TensorBoard's own `EventFileWriter` only ever begins new files,
    whose readers then have to be told which events of the older ones are void; and it needs a thread and a queue, for
    nothing where the writer may block. Its framing, `RecordWriter`, is used as it is.

    Args:
        path: of the file; its folder exists.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def size(self) -> int:
        """In bytes; 0 where there is no file."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def write(self, events: Iterable[Any], at: int) -> int:
        """Write events, and flush them once.

        Args:
            events: `Event` protos.
            at: byte at which they begin, at most `size`; the file ends behind them.

        Returns:
            The byte behind the last one.
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
        """Take away what lies behind a byte."""
        if self.size > size:
            os.truncate(self.path, size)

    def behind(self, events: int, *, after: int) -> int:
        """The byte behind so many events; behind the last complete one where there are fewer.

        Args:
            after: the byte at which they begin.
        """
        return max(islice(self._ends(after), events), default=after)

    def whole(self, size: int) -> int:
        """The byte behind the last complete event of the first `size` bytes."""
        return max((end for end in self._ends(0) if end <= size), default=0)

    def _ends(self, start: int) -> Iterator[int]:
        """The byte behind each complete event from `start` on: its length stands in front of it."""
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
