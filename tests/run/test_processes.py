"""Which process is which: by its id and its start."""

from __future__ import annotations

import os

import psutil
import pytest

from hydraloop.run.processes import is_alive, started


def test_a_process_is_alive_after_the_clock_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """psutil 5.9 adds the start of the machine that it has read last; it is told by the clock."""
    since = started(os.getpid())
    assert since is not None
    boot = last = psutil.boot_time() + 100

    def boot_time() -> float:
        nonlocal last
        last = boot
        return boot

    monkeypatch.setattr(psutil, "boot_time", boot_time)
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: since + last)
    assert is_alive(os.getpid(), since)
    boot += 100
    assert is_alive(os.getpid(), since)
