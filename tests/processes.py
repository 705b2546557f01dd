"""The processes that a test has started, which may end at any moment, and waiting for what they do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import psutil

PATIENCE = 120.0
"""Seconds within which anything happens on a busy machine."""


class Pollable(Protocol):
    """A process with the method of `Popen`."""

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""


def until(
    happened: Callable[[], object], what: str, *, process: Pollable | None = None, seconds: float = PATIENCE
) -> None:
    """Wait until something has happened.

    Args:
        what: what has not happened, if it takes longer than `seconds`.
        process: the process that does it. It is an error if it ends before.
    """
    deadline = time.monotonic() + seconds
    while not happened():
        assert process is None or process.poll() is None, f"{what}: the process has ended"
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def running_in(folder: Path) -> list[psutil.Process]:
    """Return the processes whose working directory is a folder."""
    return [process for process in psutil.process_iter() if command_line(process) and _working_in(process) == folder]


def _working_in(process: psutil.Process) -> Path | None:
    try:
        return Path(process.cwd())
    except psutil.Error:
        return None


def children(of: psutil.Process | None = None) -> dict[psutil.Process, list[str]]:
    """Return the command lines of all running descendants, by process.

    Args:
        of: the process that started them; None: this one.
    """
    found = {process: command_line(process) for process in (of or psutil.Process()).children(recursive=True)}
    return {process: command for process, command in found.items() if command}


def command_line(process: psutil.Process) -> list[str]:
    """Return the command line of a process; an empty one if it has ended."""
    try:
        return [] if process.status() == psutil.STATUS_ZOMBIE else process.cmdline()
    except psutil.Error:
        return []
