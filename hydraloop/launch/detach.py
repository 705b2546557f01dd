"""`detach=true`: the same command in a session of its own, with its output in a file."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from hydraloop.config.checks import Draft
from hydraloop.errors import UserError
from hydraloop.files import environment, lock
from hydraloop.launch import torchrun

CONTROLLER_LOG = "controller.log"
"""What a detached controller has printed, in the directory of the sweep."""
RUN_LOG = "output.log"
"""What a detached run has printed, in its directory."""
_PLACES = ("detach=", "hydra.run.dir=", "hydra.sweep.dir=", "sweep.resume=")
_POLL = 0.05
"""Seconds between two looks at the process."""


def check() -> None:
    """Refuse a process in the background that would be ended soon."""
    if "SLURM_JOB_ID" in os.environ or torchrun.is_several():
        raise UserError(
            "the processes of an allocation or of torchrun end with what has started them",
            key="detach",
            remedy="Leave it out, and submit the command to sbatch; or type it outside of the allocation.",
        )


def start(draft: Draft, key: str, directory: Path, log: str, *flags: str) -> NoReturn:
    """Start a command in the background, and exit when it has locked its directory, or as it has ended.

    Args:
        draft: of the command.
        key: the option that names the directory.
        directory: exists, and is not locked.
        log: name of the file in it for what the command prints.
        flags: of the command.
    """
    words = [*environment.command()[1:], *flags, *continued(draft.overrides, key, directory)]
    with (directory / log).open("ab") as file:
        begin = file.tell()
        process = subprocess.Popen(
            [sys.executable, "-u", *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**os.environ, "PYTHONIOENCODING": "utf-8:replace"},
            start_new_session=True,
        )
    try:
        while process.poll() is None and lock.holder(directory) is None:
            time.sleep(_POLL)
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise
    if code := process.returncode:
        with (directory / log).open(encoding="utf-8", errors="replace") as text:
            text.seek(begin)
            shutil.copyfileobj(text, sys.stderr)
        sys.exit(code if code > 0 else 128 - code)
    how = f"continues in the background, as process {process.pid}"
    print_commands(directory, how, "status", "attach", "stop")
    sys.exit(0)


def continued(overrides: Sequence[str], key: str, directory: Path) -> list[str]:
    """Return the overrides of a command that continues in the foreground, in a directory that `key` names."""
    escaped = str(directory).replace("\\", "\\\\").replace("'", "\\'")
    return [*without(overrides, *_PLACES), f"{key}='{escaped}'", "detach=false"]


def without(overrides: Sequence[str], *names: str) -> list[str]:
    """Return overrides without those that begin with a name."""
    return [line for line in overrides if not line.lstrip("+").startswith(names)]


def print_commands(path: Path, how: str, *commands: str) -> None:
    """Print how a run or a sweep in a directory continues, and the commands for it."""
    print(f"{shlex.quote(environment.shown(path))} {how}")
    for command in commands:
        print(f"  {environment.without_project(command, path)}")
