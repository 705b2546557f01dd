"""What is in a W&B run's own file, `run-<id>.wandb`: a log in LevelDB's format, a protocol buffer a record."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HEAD = 7
"""Bytes in front of the first block."""
_BLOCK = 1 << 15
_CHUNK_HEAD = struct.Struct("<IHB")
"""Checksum, length and kind of a part of a record."""
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def records(path: Path) -> Iterator[bytes]:
    """The records of a file, serialised, as far as they are whole: a process that was killed leaves a torn end.

    In memory is one block at a time: the file of a long run is large. No part of a record crosses a block's end; what
    is left there for less than the head of one is filled up.
    """
    parts, position = b"", _HEAD
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            while position + _CHUNK_HEAD.size <= len(block):
                _, length, kind = _CHUNK_HEAD.unpack_from(block, position)
                begin, position = position + _CHUNK_HEAD.size, position + _CHUNK_HEAD.size + length
                if not _WHOLE <= kind <= _LAST or position > len(block):
                    return
                parts = block[begin:position] if kind in (_WHOLE, _FIRST) else parts + block[begin:position]
                if kind in (_WHOLE, _LAST):
                    yield parts
            position = 0


def steps(path: Path) -> list[int]:
    """The step of each row of a file's history, in order."""
    from wandb.proto import wandb_internal_pb2 as protocol  # whose names are only there when it runs

    parse: Any = getattr(protocol, "Record").FromString  # noqa: B009  # the generated module makes its names when it runs
    found = []
    for serialised in records(path):
        record = parse(serialised)
        if record.HasField("history"):
            found.append(int(record.history.step.num))
    return found
