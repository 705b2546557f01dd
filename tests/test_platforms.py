"""What other platforms lack is missing when it is used, not when hydraloop is imported; Windows is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hydraloop import platforms

WITHOUT = """
import importlib, multiprocessing, os, pathlib, pkgutil, signal, subprocess, sys
import filelock, mlflow, psutil, rich.console, tensorboard.summary.writer.record_writer, torch.utils.data, wandb
import torch.distributed.elastic.agent.server.local_elastic_agent, torch.distributed.fsdp, tests.helpers

for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
for name in ("fork", "setsid", "getuid", "killpg", "nice", "register_at_fork", "sched_getaffinity", "WNOHANG"):
    delattr(os, name)
for name in ("SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGKILL", "SIGPIPE", "SIGCHLD", "pthread_sigmask"):
    delattr(signal, name)
import hydraloop
for module in pkgutil.walk_packages(hydraloop.__path__, "hydraloop."):
    importlib.import_module(module.name)
sys.argv = ["train.py", "--help"]
hydraloop.main(folder=pathlib.Path.cwd())
"""


@pytest.mark.slow
def test_names_of_posix_are_looked_up_where_they_are_used() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage" in done.stdout


def test_on_windows_a_sentence_names_wsl(monkeypatch: pytest.MonkeyPatch) -> None:
    platforms.check()
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit, match=r"^error: hydraloop does not run on Windows itself: run it in WSL \("):
        platforms.check()


def test_signals_that_the_platform_lacks_are_left_out() -> None:
    assert [one.name for one in platforms.signals("SIGINT", "SIGOTHER")] == ["SIGINT"]
