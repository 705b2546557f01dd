"""What the terminal and train.log say about errors."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field

from hydraloop.errors import UserError, printable
from hydraloop.files.result import describe
from hydraloop.files.secrets import mask_text
from hydraloop.files.terminal import print_json

log = logging.getLogger("hydraloop")

NAMED = 5
"""Jobs without a result that the last line of a sweep names. More do not fit on a screen."""


def failed_jobs(names: Sequence[str], count: int, interrupted: int = 0) -> str:
    """Return the last line of a sweep.

    Args:
        names: of the jobs that have failed or were interrupted.
        count: of all jobs.
        interrupted: how many of `names` were interrupted.
    """
    failed = len(names) - interrupted
    numbers = f"{failed} of {count} jobs failed" if failed else f"{interrupted} of {count} jobs were interrupted"
    if failed and interrupted:
        numbers += f", {interrupted} interrupted"
    others = f" and {len(names) - NAMED} others" if len(names) > NAMED else ""
    return f"{numbers}: {', '.join(names[:NAMED])}{others}"


def log_cause(error: BaseException) -> None:
    """Write the error in which a user's mistake was found to train.log, with its traceback, but not to the terminal."""
    cause = error.__cause__
    if isinstance(error, UserError) and cause is not None and not isinstance(cause, UserError):
        log.error("The mistake was found in this error: %s", describe(cause), exc_info=cause, extra={"in_files": True})


@dataclass
class Reports:
    """Shows each error once: errors of a job when they happen, others at the end of the command."""

    with_traceback: bool
    """Whether a user's mistakes are shown with their traceback, too (HYDRA_FULL_ERROR=1)."""
    with_debugger: bool = False
    """Whether the debugger is opened after an error of a run (--pdb)."""
    as_json: bool = False
    """Whether a user's mistake is printed in JSON, on standard output (--json)."""
    shown: list[BaseException] = field(default_factory=list)
    """Errors of jobs."""

    def end_job(self, error: BaseException, *, trace: str | None = None, in_summary: bool = False) -> None:
        """Show the error of a run in the terminal and in train.log.

        Args:
            trace: the traceback of the error in another process. None: the error was raised in this one.
            in_summary: the summary of the run has named the error. Then an interruption is not shown again.
        """
        self.shown.append(error)
        if isinstance(error, KeyboardInterrupt):
            if not in_summary:
                log.info("%s", describe(error))
        elif trace is not None:
            log.error("%s", "\n".join(filter(None, (str(error), trace.rstrip()))))
        elif isinstance(error, UserError) and not self.with_traceback:
            log.error("%s", error)
            log_cause(error)
        else:
            log.error("%s", describe(error), exc_info=error)

    def show(self, error: BaseException) -> None:
        """Print an error that ends the command, unless it is that of a job."""
        if error in self.shown:
            return
        if isinstance(error, UserError) and self.as_json:
            print_json({"error": {"key": error.key, "problem": error.problem, "remedy": error.remedy}})
            return
        if isinstance(error, KeyboardInterrupt):
            text = f"{describe(error)}\n"
        elif isinstance(error, UserError) and not self.with_traceback:
            text = f"error: {error}\n"
        elif trace := getattr(error, "trace", ""):  # in another process
            text = f"error: {error}\n{trace}"
        else:
            text = "".join(traceback.format_exception(error))
        print(printable(mask_text(text)), end="", file=sys.stderr)

    def debug(self, error: BaseException) -> None:
        """Open the debugger, if that was asked for, where an error of a run or the one that led to it was raised.

        A signal and a mistake that no exception has led to do not open it.
        """
        cause = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        if (
            self.with_debugger
            and error in self.shown
            and isinstance(cause, Exception)
            and not isinstance(cause, UserError)
        ):
            import pdb  # 30 ms

            pdb.post_mortem(cause.__traceback__)
