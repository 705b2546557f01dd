"""How ranks fail, and which failure is the cause of the others. Does not import torch."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Self

from hydraloop.errors import PeerError, Terminated, UserError, interrupt
from hydraloop.files import atomic
from hydraloop.files.result import Result, describe, signal_of
from hydraloop.files.secrets import mask_text
from hydraloop.launch.exit import Preempted, signal_name

Kind = Literal["mistake", "error", "killed", "lost", "signal", "follows"]
"""How a rank has failed:

- mistake: a `UserError`.
- error: another exception.
- killed: the process has ended without an exception.
- lost: another rank has ended and has reported no error.
- signal: the rank got a signal.
- follows: another rank has failed first.
"""
_ORDER: dict[Kind, int] = {"mistake": 0, "error": 0, "killed": 1, "lost": 2, "signal": 3, "follows": 4}
"""The failure with the lowest number is the cause. A lost connection often means that another rank was killed."""
_SENT = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that users, terminals and schedulers send. A rank that one of them has ended has not crashed."""
_LOST = re.compile(r"gloo|nccl|c10d|tcpstore|connection (?:closed|reset|refused)|broken pipe", re.IGNORECASE)
"""Found in the messages of torch.distributed when another rank has ended."""


class RankError(Exception):
    """The failure of a rank in another process.

    Args:
        text: rank, type and message.
        trace: the traceback in that process; empty without one.
        was_killed: whether SIGKILL has ended it.
    """

    def __init__(self, text: str, trace: str = "", *, was_killed: bool = False) -> None:
        super().__init__(text)
        self.trace = trace
        self.was_killed = was_killed


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rank failed. As JSON, it is one of torchelastic's error files (TORCHELASTIC_ERROR_FILE)."""

    kind: Kind
    message: str
    """Rank, type and message of the error; for a mistake, the problem."""
    timestamp: float
    """Seconds since 1970."""
    trained: bool = False
    """Whether the rank had completed an iteration."""
    key: str | None = None
    """For a mistake."""
    remedy: str | None = None
    """For a mistake."""
    trace: str = ""
    """For an error: the traceback."""
    number: int = 0
    """The number of the signal that ended the rank."""

    @classmethod
    def of(
        cls, error: BaseException, rank: int, *, trained: bool = False, first: tuple[int, str] | None = None
    ) -> Self:
        """Make the failure of a rank from the exception that it raised.

        Args:
            first: the rank that failed first and its error, if known.
        """
        made = partial(cls, timestamp=time.time(), trained=trained)
        is_first = first is None or first[0] == rank
        if isinstance(error, KeyboardInterrupt):
            number = error.number if isinstance(error, Terminated) else int(signal.SIGINT)
            if is_first or number == signal.SIGINT:
                name = signal.Signals(number).name
                return made("signal", f"rank {rank} was ended by {name}", number=number)
        if first is not None and not is_first:
            number = signal_of(first[1])
            return made("signal" if number else "follows", f"rank {first[0]}: {first[1]}", number=number)
        if isinstance(error, UserError):
            return made("mistake", error.problem, key=error.key, remedy=error.remedy)
        if _is_lost_connection(error):
            return made("lost", f"rank {rank} lost another rank, which left no error ({describe(error)})")
        trace = "".join(traceback.format_exception(error))
        return made("error", f"rank {rank}: {describe(error)}", trace=trace)

    @classmethod
    def of_exit(cls, rank: int, exit_code: int, log: Path) -> Self:
        """Make the failure of a rank that ended without raising an exception.

        Args:
            exit_code: as of `subprocess`, negative for a signal.
            log: the file with the rank's output.
        """
        if -exit_code in _SENT:  # before the rank could handle it
            return cls.of(interrupt(-exit_code), rank)
        number = 0
        if -exit_code == signal.SIGKILL:
            reason = "was killed by SIGKILL (out of memory?)"
            number = signal.SIGKILL
        elif exit_code < 0:
            reason = f"crashed ({signal_name(-exit_code)}), see {os.path.relpath(log)}"
        else:
            reason = f"ended with exit code {exit_code} and left no error, see {os.path.relpath(log)}"
        return cls("killed", f"rank {rank} {reason}", time.time(), number=number)

    def error(self) -> BaseException:
        """Return the exception that the job raises."""
        if self.kind == "mistake":
            return UserError(self.message, key=self.key, remedy=self.remedy)
        if self.kind == "signal":
            return interrupt(self.number)
        return RankError(self.message, self.trace, was_killed=self.number == signal.SIGKILL)

    def to_json(self) -> str:
        """Return one line of text, with secrets masked."""
        texts = {name: mask_text(text) for name in ("message", "remedy", "trace") if (text := getattr(self, name))}
        return json.dumps({**asdict(self), **texts})

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Return the failure that `to_json` wrote."""
        return cls(**json.loads(text))

    def write(self, path: Path) -> None:
        """Write the failure to a file, unless the process that started the ranks has ended and removed the folder."""
        if path.parent.exists():
            atomic.write_text(path, self.to_json())


def cause(failures: Iterable[Failure]) -> Failure:
    """Return the failure that made the job fail.

    `ChildFailedError.get_first_failure` compares times only, in whole seconds. A rank that lost its connection often
    reports before the launcher sees that another rank was killed.
    """

    def order(failure: Failure) -> tuple[int, float]:
        # After a failure, the launcher sends SIGTERM to the other ranks. Any other signal came from outside.
        is_sent = failure.kind == "signal" and failure.number not in (0, signal.SIGTERM)
        return _ORDER["killed" if is_sent else failure.kind], failure.timestamp

    return min(failures, key=order)


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How a run has ended."""

    error: BaseException | None = None
    """The error that ends the command; None for a run that is complete."""
    trained: bool = True
    """Whether the run has completed an iteration."""

    @classmethod
    def from_result(cls, run_dir: Path) -> Self:
        """Return the end of a run that has written `result.json` without an error: it is complete or was preempted."""
        result = Result.read(run_dir)
        if result is None:
            return cls(error=RuntimeError("the run has ended without a result"))
        return cls(None if result.preempted_by is None else Preempted(result.preempted_by))

    @classmethod
    def from_failure(cls, failure: Failure) -> Self:
        """Return the end of a run that has failed."""
        return cls(error=failure.error(), trained=failure.trained)


def _is_lost_connection(error: BaseException | None) -> bool:
    """Return whether the error, or one that led to it, was raised because another rank has ended."""
    seen: set[int] = set()  # an error may be its own cause: raise error from error
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        from_torch = type(error).__module__.startswith("torch.distributed") or type(error).__name__.startswith("Dist")
        lost_message = isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None
        if isinstance(error, PeerError) or from_torch or lost_message:
            return True
        error = error.__cause__ or error.__context__
    return False
