"""A rank that has finished ends before torch is unloaded."""

from __future__ import annotations

import atexit
from collections.abc import Callable


def leave_before_unloading() -> Callable[[int], None]:
    """Return a function that sets the code with which this process exits when Python's other exit handlers have run.

    Call it before torch is imported: Python calls the first exit handler last.
    """
    codes: list[int] = []

    def at_exit() -> None:
        if codes:
            from hydraloop.launch.termination_signals import leave

            # While torch is unloaded, a thread of gloo may still run, and abort the process: once in hundreds of jobs.
            leave(codes[0])

    atexit.register(at_exit)
    return codes.append
