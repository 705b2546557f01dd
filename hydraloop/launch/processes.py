"""Processes: identify them, send them signals, and kill them."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

_SAME = 2.0
"""Seconds by which two measurements of a start may differ; the start of the machine is known to a second."""


def started(pid: int) -> float | None:
    """Return the seconds from the start of the machine to that of a process; None if it does not exist or is a zombie.

    The number does not change when the clock is set.
    """
    import psutil  # 15 ms, which --help and --dry-run do without

    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        boot = psutil.boot_time()  # first: psutil 5.9 adds what this function last returned, before the clock was set
        return float(process.create_time() - boot)
    except psutil.Error:
        return None


def is_alive(pid: int, since: float | None) -> bool:
    """Return whether a process still exists. A process that has ended and was not waited for does not count.

    Args:
        since: what `started` returned for it.
    """
    now = started(pid)
    return now is not None and since is not None and abs(now - since) < _SAME


def kill_tree(pid: int) -> None:
    """Kill a process and all that it has started, also those with a session of their own, such as ranks."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        # This process last, so that it can kill the others. Otherwise the root first: it must not see how they end.
        for process in sorted([root, *root.children(recursive=True)], key=lambda found: found.pid == os.getpid()):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)


def send(pid: int, since: float | None, sign: signal.Signals) -> None:
    """Send a signal to a process, unless it has ended. SIGKILL also ends all that it has started.

    Args:
        since: what `started` returned for it.
    """
    if not is_alive(pid, since):
        return
    if sign is signal.SIGKILL:
        kill_tree(pid)
    else:
        with suppress(ProcessLookupError):
            os.kill(pid, sign)
