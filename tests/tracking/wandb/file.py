"""Reads a W&B run's own file, `run-<id>.wandb`: a log in LevelDB's format with one protocol buffer for each record."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

_HEAD = 7
"""Bytes before the first block."""
_BLOCK = 1 << 15
_CHUNK_HEAD = struct.Struct("<IHB")
"""Checksum, length and kind of a chunk."""
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def records(path: Path) -> Iterator[bytes]:
    """Yield the complete records of a file, serialized. A process that was killed may leave an incomplete one.

    Reads one block at a time, because a long run's file is large. Chunks do not cross the end of a block. The rest of
    a block is padding if it is too short for a chunk's head.
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
