"""Runs `evaluate`, `predict` and `export`: commands that load a run, and do not change it.

They start as many processes as the run had, so that results have the same bits.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from hydraloop.cli.arguments import typed_keys
from hydraloop.cli.console import PrintableFormatter
from hydraloop.cli.error_reports import Reports
from hydraloop.commands import parser
from hydraloop.errors import UserError, printable
from hydraloop.processes import elastic, torchrun
from hydraloop.processes.termination_signals import terminable
from hydraloop.processes.unloading import leave_before_unloading
from hydraloop.run_files.uncollected import uncollected
from hydraloop.safety import working_directory
from hydraloop.safety.secrets import remember_overrides

if TYPE_CHECKING:
    from hydraloop.engine.distributed.comm import Distributed


class RankCommand(ABC):
    """A command whose arguments have been checked as far as that needs no data and no model.

    Args:
        cfg: of the run. It gets the number of processes with which the run was trained.
        meta: of a checkpoint of the run.
        overrides: changes of the run's config, as typed.
    """

    source: str
    """What is used, for the terminal."""

    def __init__(self, cfg: DictConfig, meta: Mapping[str, Any], overrides: Sequence[str]) -> None:
        self.cfg = cfg
        self.trained_by: int | None = meta.get("ranks")
        """How many ranks have trained; None if no checkpoint says so."""
        options = cfg.distributed
        if "distributed.nproc_per_node" not in typed_keys(overrides):  # of a run of torchrun, the config says 1
            options.nproc_per_node = meta.get("ranks_per_node", options.nproc_per_node)

    @property
    def processes(self) -> int:
        """How many processes have to be started for it, if no launcher has. Valid until `run`."""
        return int(self.cfg.distributed.nproc_per_node)

    @abstractmethod
    def run(self, ranks: Distributed) -> str:
        """Do it; called on each rank. Returns what to print on rank 0."""


def run(argv: Sequence[str], args: argparse.Namespace) -> int:
    """Run a command. Returns the exit code: 0, 1 after an error message, 128 + n after signal n."""
    finished = leave_before_unloading()
    remember_overrides(args.overrides)
    _log_warnings()
    working_directory.trust(argv, args.run, args.trusted)
    if torchrun.is_several():
        torchrun.keep_quiet()
    ranks: list[Distributed] = []
    try:
        with terminable():
            code = _run(argv, args, ranks)
    except (Exception, KeyboardInterrupt) as error:
        if _reports(error, *ranks):
            Reports(with_traceback=os.environ.get("HYDRA_FULL_ERROR") == "1").show(error)
        code = 128 + getattr(error, "number", signal.SIGINT) if isinstance(error, KeyboardInterrupt) else 1
    if torchrun.is_several():
        finished(code)
    return code


def prepare(args: argparse.Namespace) -> RankCommand:
    """Return a command: an object of the class `Evaluate` in `evaluate.py`, or of another command's.

    Raises:
        UserError: a mistake in its arguments, or a run that cannot be loaded.
    """
    given, overrides = parser.split(args)
    with uncollected():
        module = importlib.import_module(f"hydraloop.commands.{args.command}")
    made: RankCommand = getattr(module, args.command.capitalize())(args, given, overrides)
    return made


def _run(argv: Sequence[str], args: argparse.Namespace, ranks: list[Distributed]) -> int:
    """Run a command, and add this process's connection to the other ranks to `ranks`."""
    command = prepare(args)
    from hydraloop.engine.distributed.process_group import connect

    if command.processes > 1 and not torchrun.is_several():
        return elastic.run_module(["hydraloop", *argv], command.processes)
    distributed = connect(command.cfg.distributed, command.cfg.engine.device)
    ranks.append(distributed)
    differ = command.trained_by not in (None, distributed.world_size)
    note = f" (trained by {command.trained_by} ranks: the last digits can differ)" if differ else ""
    text = command.run(distributed)
    if distributed.is_main:
        print(printable(f"{command.source}{note}"), file=sys.stderr)  # standard output has only the result
        print(text)
    distributed.close()
    return 0


def _log_warnings() -> None:
    """Write warnings to standard error, on rank 0. Standard output has only the result."""
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter("warning: %(message)s"))
    logging.basicConfig(level=logging.WARNING if torchrun.rank() == 0 else logging.CRITICAL, handlers=[handler])


def _reports(error: BaseException, distributed: Distributed | None = None) -> bool:
    """Return whether this rank prints the error: the one that failed first."""
    if distributed is None:  # all ranks have the same mistake
        return torchrun.rank() == 0 or not isinstance(error, UserError | KeyboardInterrupt)
    distributed.abandon(error)
    failed = distributed.first_failure()
    return failed is None or failed[0] == distributed.rank
