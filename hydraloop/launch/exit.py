"""How a process of hydraloop exits, and with which code."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable
from signal import SIGINT, Signals
from typing import NoReturn

from hydraloop.errors import Terminated, UserError
from hydraloop.launch import torchrun

REQUEUE = os.EX_TEMPFAIL
"""75, the exit code of a preempted run. Schedulers can be told to start such a job again."""


class Preempted(KeyboardInterrupt):
    """Raised when the run was preempted: it has saved, and a scheduler can start the same command line again.

    Args:
        reason: what has preempted it.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.code = 128 + SIGINT if reason == "SIGINT" else REQUEUE


def exit_code(error: BaseException | None, *, of_run: bool = True) -> int:
    """Return the code with which a process exits after an error.

    | code | meaning |
    |---|---|
    | 0 | done; also a preempted rank, because its launcher would restart the ranks |
    | 1 | a run has failed |
    | 2 | a mistake in the command line: no run has started |
    | 75 | the run was preempted and has saved |
    | 128 + n | ended by signal n: 129 after SIGHUP, 130 after Ctrl-C, 143 after SIGTERM |

    Args:
        of_run: whether the error has ended a run. Otherwise, a `UserError` is a mistake in the command line.
    """
    if error is None:
        return 0
    if isinstance(error, Preempted):
        return 0 if torchrun.is_launched() else error.code
    if isinstance(error, KeyboardInterrupt):
        return 128 + (error.number if isinstance(error, Terminated) else SIGINT)
    return 2 if isinstance(error, UserError) and not of_run else 1


def signal_name(number: int) -> str:
    """Return the name of a signal, as `SIGTERM`. Most real-time signals have a number only."""
    return Signals(number).name if number in list(Signals) else f"signal {number}"


def exit_now(code: int) -> NoReturn:
    """End this process at once after a failure. The normal end of torch.distributed may wait for lost ranks."""
    try:
        import multiprocessing  # 3 ms

        for child in multiprocessing.active_children():
            child.terminate()
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)  # also on a full disk


def exit_before_unloading() -> Callable[[int], None]:
    """Return a function that sets the code with which this process exits when Python's other exit handlers have run.

    Call it before torch is imported: Python calls the first exit handler last.
    """
    codes: list[int] = []

    def at_exit() -> None:
        if codes:
            # While torch is unloaded, a thread of gloo may still run, and abort the process: once in hundreds of jobs.
            exit_now(codes[0])

    atexit.register(at_exit)
    return codes.append
