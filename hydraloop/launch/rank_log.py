"""Where a rank's words go: rank 0's to the terminal and train.log, each other's to a file of its own."""

from __future__ import annotations

import faulthandler
import io
import logging.config
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hydraloop.cli.console import MaskingFormatter, mask_handlers
from hydraloop.launch.job import Job
from hydraloop.safety import hydra_versions

_CRASHES = {
    "Segmentation fault": signal.SIGSEGV,
    "Bus error": signal.SIGBUS,
    "Illegal instruction": signal.SIGILL,
    "Floating point exception": signal.SIGFPE,
    "Floating-point exception": signal.SIGFPE,  # from Python 3.13 on
}
"""What faulthandler writes, by signal."""
_FORMAT = "[%(asctime)s][%(name)s][%(levelname)s] %(message)s"


def path(job: Job, rank: int) -> Path:
    """The file that has what a rank said."""
    return Path(job.run_dir) / ("train.log" if rank == 0 else f"rank{rank}.log")


def crash(file: Path, start: int) -> int:
    """The signal of the crash that a rank's log reports; SIGKILL if there is no such report, as nothing can report it.

    Args:
        start: size of the file in bytes when the rank began.
    """
    with file.open("rb") as opened:
        opened.seek(start)
        found = re.search(rb"^Fatal Python error: ([\w -]+)", opened.read(), re.MULTILINE)
    return signal.SIGKILL if found is None else _CRASHES.get(found[1].decode(), signal.SIGABRT)


def configure(job: Job, rank: int) -> None:
    """Set up logging as the job says; for a rank other than 0, send it and all output, native code's too, to a file.

    A crash in native code leaves its stack there, too.
    """
    faulthandler.enable(file=2)
    if rank == 0:
        config = None if job.logging is None else OmegaConf.create(_appending(job.logging))
        hydra_versions.configure_log(config, job.verbose)
        mask_handlers()
        return
    file = path(job, rank)
    file.parent.mkdir(parents=True, exist_ok=True)
    _redirect(file)
    logging.config.dictConfig(_into(file, job.logging or {}))
    if isinstance(job.verbose, bool):
        verbose = [""] if job.verbose else []  # the root's
    else:
        verbose = [job.verbose] if isinstance(job.verbose, str) else job.verbose
    for name in verbose:
        logging.getLogger(name).setLevel(logging.DEBUG)


def _appending(config: dict[str, Any]) -> dict[str, Any]:
    """The same with no file opened anew: the launching process has begun it."""
    handlers = {
        name: {**handler, "mode": "a"} if "mode" in handler and "filename" in handler else handler
        for name, handler in (config.get("handlers") or {}).items()
    }
    return {**config, "handlers": handlers}


def _into(file: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The levels of a logging config, all of it written to one file."""
    levels = {
        name: {"level": one["level"]} for name, one in (config.get("loggers") or {}).items() if one and "level" in one
    }
    return {
        "version": 1,
        "formatters": {"full": {"()": MaskingFormatter, "fmt": _FORMAT}},
        "handlers": {"file": {"class": "logging.FileHandler", "formatter": "full", "filename": str(file)}},
        "root": {"level": (config.get("root") or {}).get("level", "INFO"), "handlers": ["file"]},
        "loggers": levels,
        "disable_existing_loggers": False,
    }


def _redirect(file: Path) -> None:
    """Let the process's standard output and error end in a file."""
    opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(opened, number)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    os.close(opened)
