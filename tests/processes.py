"""The processes that a test has started. They may end at any moment."""

from __future__ import annotations

import psutil


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
