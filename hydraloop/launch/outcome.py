"""Outcome: how one rank ended; and which rank's end was the cause of the others'. Without torch."""

from __future__ import annotations

import json
import re
import signal
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from hydraloop.errors import PeerError, UserError
from hydraloop.run.result import describe

Kind = Literal["done", "mistake", "error", "died", "lost", "signal", "consequence"]
_FIRST: tuple[Kind, ...] = ("mistake", "error", "died", "lost", "signal", "consequence")
"""What explains a failed job best: the error of a rank's own, then a death without a word, then the loss of another
rank (whose death it is the sign of), then being told to end."""
_LOST = re.compile(r"gloo|nccl|c10d|tcpstore|connection (?:closed|reset|refused)|broken pipe", re.IGNORECASE)
"""In messages of errors that torch.distributed raises when another rank has gone."""


class RankError(Exception):
    """What a rank raised, or died of, in a process of its own.

    Args:
        text: rank, type and message in one string.
        trace: the traceback, as that process saw it; empty where there is none.
    """

    def __init__(self, text: str, trace: str = "") -> None:
        super().__init__(text)
        self.trace = trace


class Terminated(KeyboardInterrupt):
    """This process was told to end by a signal other than Ctrl-C's.

    Args:
        number: the signal's.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"by {signal.Signals(number).name}")
        self.number = number


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a rank ended."""

    rank: int
    kind: Kind
    value: float | None = None
    """What a sweep optimises, where the kind is `done`."""
    trained: bool = False
    """Whether it completed an iteration."""
    text: str = ""
    """Type and message of the error; of a mistake, the problem alone."""
    key: str | None = None
    """Of a mistake."""
    remedy: str | None = None
    """Of a mistake."""
    trace: str = ""
    """The traceback of an error."""
    number: int = 0
    """The signal's."""
    first: tuple[int, str] | None = None
    """Of a consequence: the rank that failed first, and what it said in short."""
    time: float = 0.0
    """When, in seconds since 1970."""

    @classmethod
    def of(
        cls, error: BaseException, rank: int, *, trained: bool = False, first: tuple[int, str] | None = None
    ) -> Outcome:
        """The outcome of a rank that raised.

        Args:
            first: the rank that is known to have failed first, and what it said.
        """
        trace = "".join(traceback.format_exception(error))
        number = _number(error)
        kind: Kind = "error"
        if isinstance(error, UserError):
            kind = "mistake"
            trace = ""
        elif number:
            kind, trace = "signal", ""
        elif any(map(_is_of_lost, _chain(error))):
            kind = "lost"
        if first is not None and first[0] != rank and number != signal.SIGINT:
            kind = "consequence"
        mistake = error if isinstance(error, UserError) else None
        return cls(
            rank=rank,
            kind=kind,
            trained=trained,
            text=describe(error) if mistake is None else mistake.problem,
            key=None if mistake is None else mistake.key,
            remedy=None if mistake is None else mistake.remedy,
            trace=trace,
            number=number,
            first=first if kind == "consequence" else None,
            time=time.time(),
        )

    @classmethod
    def of_death(cls, rank: int, exit_code: int, log: str) -> Outcome:
        """The outcome of a rank that left none.

        Args:
            exit_code: as of `subprocess`: negative for a signal.
            log: where its last words may be.
        """
        if exit_code in (-signal.SIGTERM, -signal.SIGINT):  # told to end before it could handle it
            return cls(rank=rank, kind="signal", number=-exit_code, time=time.time())
        if exit_code < 0:
            name = signal.Signals(-exit_code).name
            text = f"was killed by {name}{' (out of memory?)' if name == 'SIGKILL' else f', see {log}'}"
        else:
            text = f"ended with exit code {exit_code} and left no error, see {log}"
        return cls(rank=rank, kind="died", text=text, time=time.time())

    def error(self) -> BaseException | None:
        """What the job raises for it; None where all is well."""
        if self.kind == "done":
            return None
        if self.kind == "mistake":
            return UserError(self.text, key=self.key, remedy=self.remedy)
        if self.kind == "signal":
            return KeyboardInterrupt() if self.number == signal.SIGINT else Terminated(self.number)
        if self.kind == "died":
            return RankError(f"rank {self.rank} {self.text}")
        if self.first is not None:
            return RankError(f"rank {self.first[0]}: {self.first[1]}")
        if self.kind == "lost":
            return RankError(f"rank {self.rank} lost another rank, which left no error ({self.text})")
        return RankError(f"rank {self.rank}: {self.text}", self.trace)

    def to_json(self) -> str:
        """The outcome as one line of text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Outcome:
        """The outcome that `to_json` wrote."""
        return cls(**json.loads(text))


def cause(outcomes: Iterable[Outcome]) -> Outcome | None:
    """The one that made the job fail; None where none has failed."""
    failed = [outcome for outcome in outcomes if outcome.kind != "done"]
    return min(failed, key=lambda outcome: (_order(outcome.kind), outcome.time), default=None)


def _order(kind: Kind) -> int:
    return max(1, _FIRST.index(kind))  # a mistake and an error by time


def _number(error: BaseException) -> int:
    if isinstance(error, Terminated):
        return error.number
    return int(signal.SIGINT) if isinstance(error, KeyboardInterrupt) else 0


def _is_of_lost(error: BaseException) -> bool:
    """Whether torch.distributed raised it for want of another rank."""
    if isinstance(error, PeerError):
        return True
    of_torch = type(error).__module__.startswith("torch.distributed") or type(error).__name__.startswith("Dist")
    return of_torch or (isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what it came of."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__
