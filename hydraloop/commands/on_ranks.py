"""Runs `evaluate`, `predict` and `export`: commands that load a run, and do not change it.

They start as many processes as the run had, so that results have the same bits.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from hydraloop.commands.evaluate import Evaluate, FinishedRunCommand
from hydraloop.commands.export import Export
from hydraloop.commands.parser import OnRun
from hydraloop.commands.predict import Predict
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.distributed.process_group import connect
from hydraloop.errors import printable
from hydraloop.files import environment
from hydraloop.files.console import PrintableFormatter
from hydraloop.launch import start_ranks, torchrun
from hydraloop.launch.failure import Failure
from hydraloop.launch.peers import Peers

_COMMANDS: dict[str, type[FinishedRunCommand]] = {"evaluate": Evaluate, "predict": Predict, "export": Export}


def run(typed: OnRun, argv: Sequence[str], peers: Peers) -> None:
    """Run a command, on several ranks if the run had several. Rank 0 prints the result.

    Args:
        argv: all arguments of this process.

    Raises:
        UserError: a mistake in the arguments, or a run that cannot be loaded.
        BaseException: the error of this rank, or of the one that has failed first.
    """
    _log_warnings()
    command = prepare(typed)
    if command.processes > 1 and not torchrun.is_several():
        ended, _ = start_ranks.launch(command.cfg.distributed, environment.script()[1:], argv, {})
        if ended.error is not None:
            raise ended.error
        return
    peers.skip_plan()
    ranks = connect(command.cfg.distributed, command.cfg.engine.device)
    differ = command.trained_by not in (None, ranks.world_size)
    note = f" (trained by {command.trained_by} ranks: the last digits can differ)" if differ else ""
    text = _result(command, ranks)
    if ranks.is_main:
        print(printable(f"weights: {command.found.file}{note}"), file=sys.stderr)  # standard output has only the result
        print(text)
    ranks.close()


def prepare(typed: OnRun) -> FinishedRunCommand:
    """Return a command whose arguments are checked as far as that needs no data and no model."""
    return _COMMANDS[typed.name](typed)


def _result(command: FinishedRunCommand, ranks: Distributed) -> str:
    try:
        return command.run(ranks)
    except BaseException as error:
        ranks.abandon(error)
        first = ranks.first_failure()
        if ranks.world_size == 1 or first is None:
            raise
        raise Failure.of(error, ranks.rank, first=first).error() from error


def _log_warnings() -> None:
    """Write warnings to standard error, on rank 0. Standard output has only the result."""
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter("warning: %(message)s"))
    logging.basicConfig(level=logging.WARNING if torchrun.rank() == 0 else logging.CRITICAL, handlers=[handler])
