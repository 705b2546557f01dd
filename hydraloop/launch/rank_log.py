"""Where the output of a rank goes: rank 0's to the terminal and train.log, that of every other rank to its own file."""

from __future__ import annotations

import faulthandler
import io
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hydraloop.cli.console import mask_handlers
from hydraloop.launch.job import Job
from hydraloop.safety import hydra_versions

_CRASHES = {
    "Segmentation fault": signal.SIGSEGV,
    "Bus error": signal.SIGBUS,
    "Illegal instruction": signal.SIGILL,
    "Floating point exception": signal.SIGFPE,
    "Floating-point exception": signal.SIGFPE,  # since Python 3.13
}
"""What faulthandler writes, by signal."""


def path(job: Job, rank: int) -> Path:
    """Return the file with the output of a rank."""
    return Path(job.run_dir) / ("train.log" if rank == 0 else f"rank{rank}.log")


def crash(file: Path, start: int) -> signal.Signals:
    """Return the signal that a rank's log reports; SIGKILL without a report, since a process cannot report that.

    Args:
        start: size of the file in bytes when the rank started.
    """
    with file.open("rb") as opened:
        opened.seek(start)
        found = re.search(rb"^Fatal Python error: ([\w -]+)", opened.read(), re.MULTILINE)
    return signal.SIGKILL if found is None else _CRASHES.get(found[1].decode(), signal.SIGABRT)


def configure(job: Job, rank: int) -> None:
    """Set up logging. For a rank other than 0, redirect all output to its file, also that of native code.

    A crash in native code writes its stack to the same place.
    """
    faulthandler.enable(file=2)
    if rank > 0:
        path(job, rank).parent.mkdir(parents=True, exist_ok=True)
        _redirect(path(job, rank))
    config = None if job.logging is None else OmegaConf.create(_config(job.logging, path(job, rank), rank))
    hydra_versions.configure_log(config, job.verbose)
    mask_handlers()


def _config(config: dict[str, Any], file: Path, rank: int) -> dict[str, Any]:
    """Return the logging config of a rank. Its files are not emptied: the launching process has written to them.

    Other ranks than 0 write to their own file, and to the redirected terminal only if the config names no file.
    """
    handlers = dict(config.get("handlers") or {})
    files = {name: handler for name, handler in handlers.items() if "filename" in handler}
    for name, handler in files.items():
        mode = {"mode": "a"} if "mode" in handler else {}
        handlers[name] = {**handler, **mode, "filename": handler["filename"] if rank == 0 else str(file)}
    config = {**config, "handlers": handlers}
    if rank > 0 and config.get("root"):
        names = config["root"].get("handlers") or []
        config["root"] = {**config["root"], "handlers": [name for name in names if name in files] or names}
    return config


def _redirect(file: Path) -> None:
    """Redirect the standard output and error of this process. torch's own redirects would empty the file."""
    opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(opened, number)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    os.close(opened)
