"""Which process is which: by its id and its start."""

from __future__ import annotations

import subprocess
import sys

import psutil

from hydraloop.launch.termination import started


def test_a_process_that_kills_itself_kills_what_it_has_started() -> None:
    program = """
import os, subprocess
from hydraloop.launch.termination import kill_tree
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
