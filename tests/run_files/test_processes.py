"""Which process is which: by its id and its start."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from hydraloop.run_files.processes import is_alive, started


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


def test_a_process_that_kills_itself_kills_what_it_has_started() -> None:
    program = """
import os, subprocess
from hydraloop.run_files.processes import kill_tree
print(subprocess.Popen(["sleep", "60"], start_new_session=True, stdout=subprocess.DEVNULL).pid, flush=True)
kill_tree(os.getpid())
"""
    ended = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=False)
    assert ended.returncode == -9
    child = int(ended.stdout)
    try:
        psutil.wait_procs([psutil.Process(child)] if psutil.pid_exists(child) else [], timeout=10)
        assert started(child) is None
    finally:
        if started(child) is not None:
            psutil.Process(child).kill()
