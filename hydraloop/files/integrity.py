"""Damage in checkpoint files: flipped bits, cut-off ends, pages of zeros. Imports no torch."""

from __future__ import annotations

import json
import re
import time
import zlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import IO, NamedTuple

from hydraloop.files.atomic import open_regular

SAFETENSORS = ".safetensors"
"""Suffix of a file with only a state dict, which any framework can read."""
CHECKSUM = "crc32"
"""Entry in the metadata of a safetensors file: the CRC-32 of the whole file, in which this entry has 8 zeros."""
NO_CHECKSUM = "0" * 8
_CHECKSUM = re.compile(rb'"crc32":"([0-9a-f]{8})"')
_PIECE = 1 << 20
_DIRECTORY = 0x10
"""Bit in the attributes of a zip archive's member, which zipfile ignores. torch reads no data of such a member."""


def damage(path: Path, rank: int = 0, ranks: int = 1, *, tensors: bool = True) -> str | None:
    """Return what is damaged in a checkpoint file, or None if it is intact. Reads the whole file, once for each change.

    Of several ranks, each reads its share of the file and verifies the checksums in it. The file is intact if no rank
    has found damage. Without `tensors`, each verifies the plain values: of a `.pth` file, a few kilobytes.

    A `.pth` file is a zip archive, which has a CRC-32 of each member. hydraloop's safetensors files have one in their
    metadata (see `seal`), and a `.pth` lists those of its shards. Files of other programs may have none; they are read,
    but their contents are not verified.
    """
    try:
        found = _damage_of(path, rank, ranks, tensors, *_version_of(path))
        shards = None if found is not None or path.suffix == SAFETENSORS else shards_of(path)
        return found if shards is None else _in_shards(shards, rank, ranks, tensors)
    except OSError as error:
        return error.strerror or str(error)


def _version_of(path: Path) -> tuple[int, ...]:
    stat = path.stat()
    version = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    # Clocks of file systems are coarse: a file of this second may change again without a change of its times.
    is_new = time.time_ns() - stat.st_ctime_ns < 1e9
    return (*version, time.monotonic_ns() if is_new else 0)


_VALUES = "/data.pkl"
"""Ends the name of the archive's member with all that is not the contents of a tensor."""
SHARDS = ".shards-"
"""In the name of a folder of shards, after the stem of its `.pth`: `epoch_5.shards-0b1c2d3e`."""
_SHARDS = re.compile(rb'\{"shards_in": "([^"/\\]+)", "files": (\{[^{}]*\})\}')


class Shards(NamedTuple):
    """The shards of a checkpoint: what its `.pth` lists, as text that is found without unpickling."""

    folder: Path
    files: Mapping[str, list[int]]
    """By name: CRC-32 and size."""

    def text(self) -> str:
        """Return the entry `shards` of the `.pth`."""
        return json.dumps({"shards_in": self.folder.name, "files": self.files})


def expands(path: Path) -> bool:
    """Return whether a `.pth` has members that are larger when they are read: a small file could fill the memory.

    torch.save compresses nothing.
    """
    import zipfile

    try:
        with zipfile.ZipFile(path) as archive:
            return any(member.file_size > member.compress_size for member in archive.infolist())
    except Exception:  # damage, which `damage` reports
        return False


def shards_of(path: Path) -> Shards | None:
    """Return the shards that a complete `.pth` file lists; None if it has all tensors itself."""
    import zipfile

    if expands(path):
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            name = next((name for name in archive.namelist() if name.endswith(_VALUES)), None)
            found = None if name is None else _SHARDS.search(archive.read(name))
    except zipfile.BadZipFile:
        return None
    return None if found is None else Shards(path.with_name(found[1].decode()), json.loads(found[2]))


def _in_shards(shards: Shards, rank: int, ranks: int, tensors: bool) -> str | None:
    there = {file.name for file in shards.folder.glob(f"*{SAFETENSORS}")}
    wrong = sorted(there ^ shards.files.keys())
    if wrong:
        return f"{shards.folder.name}/{wrong[0]} is {'not part of it' if wrong[0] in there else 'missing'}"
    for number, (name, (checksum, size)) in enumerate(shards.files.items()):
        file = shards.folder / name
        mine = tensors and number % ranks == rank
        if file.stat().st_size != size or (mine and _crc32_of(file, *_version_of(file)) != checksum):
            return f"wrong size or checksum of {shards.folder.name}/{name}"
    return None


def crc32_of(path: Path) -> int:
    """Return the CRC-32 of a file."""
    with path.open("rb") as file:
        return _continued(0, file)


@lru_cache(maxsize=1024)
def _crc32_of(path: Path, *_version: int) -> int:
    return crc32_of(path)


def _continued(checksum: int, file: IO[bytes]) -> int:
    """Return the CRC-32 of what was read before, and of the rest of the file."""
    while piece := file.read(_PIECE):
        checksum = zlib.crc32(piece, checksum)
    return checksum


@lru_cache(maxsize=128)
def _damage_of(path: Path, rank: int, ranks: int, tensors: bool, *_version: int) -> str | None:
    try:
        if path.suffix != SAFETENSORS:
            return _in_zip(path, rank, ranks, tensors)
        return _in_safetensors(path) if tensors and rank == 0 else None  # it has one checksum
    except Exception as error:  # damaged archives raise errors of about ten types
        return str(error) or type(error).__name__


def seal(path: Path) -> None:
    """Write the CRC-32 of a safetensors file into its metadata, where `CHECKSUM` is `NO_CHECKSUM`."""
    checksum, at = _sum_of(path)
    with path.open("rb+") as file:
        file.seek(at)
        file.write(b"%08x" % checksum)


def _in_safetensors(path: Path) -> str | None:
    checksum, at = _sum_of(path)
    with path.open("rb") as file:
        file.seek(at)
        return None if not at or file.read(8) == b"%08x" % checksum else "wrong checksum"


def _sum_of(path: Path) -> tuple[int, int]:
    """Return the CRC-32 of the file, without its checksum, and the checksum's position; 0 if the file has none."""
    with open_regular(path) as file:
        start = file.read(8)
        start += file.read(min(int.from_bytes(start, "little"), path.stat().st_size))
        found = _CHECKSUM.search(start)
        if found is not None:
            start = start[: found.start(1)] + NO_CHECKSUM.encode() + start[found.end(1) :]
        checksum = _continued(zlib.crc32(start), file)
    return checksum, 0 if found is None else found.start(1)


def _in_zip(path: Path, rank: int, ranks: int, tensors: bool) -> str | None:
    import zipfile

    with open_regular(path) as file, zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        for member in members:
            if member.external_attr & _DIRECTORY or member.compress_size != member.file_size:
                return f"the table of contents is wrong at {member.filename}"  # a small file could have endless zeros
        if all(not member.CRC for member in members):
            return None  # torch.serialization.set_crc32_options(False)
        for member in members:
            # A share is a part of the file.
            mine = member.header_offset * ranks // archive.start_dir == rank
            if not (mine if tensors else member.filename.endswith(_VALUES)):
                continue
            try:
                with archive.open(member) as content:
                    while content.read(_PIECE):
                        pass
            except zipfile.BadZipFile:
                return f"wrong checksum of {member.filename}"
    return None
