"""Runs a command of `python -m hydraloop`, and reports its mistakes. Imports torch only for a command that needs it."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from hydraloop.cli.error_reports import Reports
from hydraloop.commands import parser
from hydraloop.early_interrupts import deferred
from hydraloop.errors import UserError


def run(argv: Sequence[str]) -> int:
    """Run a command, whose name is the first argument.

    Returns:
        The exit code: 0; 1 if something was not possible; 2 after a mistake, 1 after one in a command that
        loads the run; 130 after Ctrl-C, otherwise 128 + the number of the signal.
    """
    reports = Reports(with_traceback=False, as_json="--json" in argv)
    try:
        args = parser.read(argv)
    except UserError as error:
        reports.show(error)
        return 2
    name = args.command
    if name in parser.ON_RANKS:
        from hydraloop.commands import on_ranks

        return on_ranks.run(argv, args)
    try:
        with deferred():
            module = importlib.import_module(f"hydraloop.commands.{name}")
        code: int = module.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, UserError) as error:
        reports.show(error if isinstance(error, UserError) else UserError(str(error)))
        return 2
    except KeyboardInterrupt:
        return 130
