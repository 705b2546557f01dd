"""Runs a command that runs no code of a project, and reports its mistakes. Does not import torch."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from hydraloop.commands import parser
from hydraloop.errors import UserError
from hydraloop.files.error_reports import Reports
from hydraloop.importing import deferred


def run(argv: Sequence[str]) -> int:
    """Run a command, whose name is the first argument.

    Returns:
        The exit code: 0; 1 if something was not possible; 2 after a mistake; 130 after Ctrl-C.
    """
    reports = Reports(with_traceback=False, as_json="--json" in argv)
    try:
        args = parser.viewed(argv[0], argv[1:])
        with deferred():
            module = importlib.import_module(f"hydraloop.commands.{args.command}")
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
