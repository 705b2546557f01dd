"""A small file system of its own, so that a test can fill it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """Mount a file system in a new folder for the body. Skips the test where mounting is not allowed."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    done = subprocess.run(mount, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting a file system needs root: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        # Lazily: a process that a test has stopped may still hold a file open.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
