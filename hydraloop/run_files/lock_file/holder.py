"""Holder: what the file of a lock says, and whether the lock is free."""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from hydraloop.run_files.processes import is_alive, machine

HELD = 60.0
"""Seconds without a renewal after which a lock from another machine is free."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The content of the file."""

    token: str
    """Random; identifies one acquisition."""
    host: str
    machine: str
    """From `processes.machine`."""
    folder: str
    """The run directory, resolved. A copy of the directory still has the original's."""
    since: str
    """Local time of the acquisition, for messages."""
    processes: tuple[tuple[int, float | None], ...]
    """Ids and starts (from `processes.started`) of the process that acquired the lock, and of rank 0 if it differs."""

    @property
    def is_here(self) -> bool:
        """Whether the holder is on this machine."""
        return self.machine == machine()

    @property
    def alive(self) -> list[tuple[int, float | None]]:
        """The processes that have not ended, if they are on this machine."""
        return [process for process in self.processes if self.is_here and is_alive(*process)]

    def holds(self, path: Path, handle: int) -> bool:
        """Whether the lock is not free."""
        if not self.is_here:
            return is_renewed(path.parent, handle)
        copied = os.path.isdir(self.folder) and not os.path.samefile(self.folder, path.parent)
        return not copied and bool(self.alive)


def is_renewed(folder: Path, handle: int) -> bool:
    """Return whether an open file in a folder was renewed in the last 60 s, by the clock of the file system."""
    try:
        with tempfile.TemporaryFile(dir=folder) as new:
            now = os.fstat(new.fileno()).st_mtime
    except OSError:  # this process may only read, or the disk is full
        now = time.time()
    return now - os.fstat(handle).st_mtime < HELD


def read(handle: int) -> Holder | None:
    """Return the holder; None if the file is empty or damaged."""
    try:
        found = json.loads(os.pread(handle, 1 << 16, 0).partition(b"\n")[0])
        return Holder(**{**found, "processes": tuple((int(pid), since) for pid, since in found["processes"])})
    except (ValueError, TypeError, KeyError):
        return None


def write(handle: int, holder: Holder) -> None:
    """Write the first line in place: on a full disk and after a kill, the holder before is not lost."""
    content = json.dumps(asdict(holder)).encode() + b"\n"
    os.pwrite(handle, content, 0)
    os.ftruncate(handle, len(content))
