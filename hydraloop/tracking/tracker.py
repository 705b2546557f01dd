"""Tracker: what a service has to be able to do to follow a run. Without torch: it works in a process of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from hydraloop.run.record_log import Record
from hydraloop.run.result import Status

Ending = Status | Literal["killed"]
"""How a run ended; `killed`: its process is gone and has left no result."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One process's part of a run, as it is described to trackers; everything secret is masked."""

    number: int
    """0: the run's start; n: the n-th time it was resumed."""
    iteration: int
    """Completed iterations at which it went on; 0 for a start."""
    params: dict[str, str | int | float | bool | None]
    """The resolved config, flattened: `optimizer.lr`, `hooks.ema.momentum`; elements of lists by position."""
    config: str
    """The resolved config as YAML."""
    tags: dict[str, str]
    """`git_commit`, `command`, `host`, `world_size`, `user`, `device`, … whatever is known."""
    began: float
    """Seconds since 1970."""
    pid: int
    """Of the training process."""
    started: float | None = None
    """Seconds from the machine's start to that process's: with `pid`, what tells it from all others there."""
    earlier_result: str | None = None
    """Digest of the `result.json` that an earlier attempt had left."""
    patch: str | None = None
    """Path of its `code.patch`, relative to the run directory; None if the code was committed."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """The sweep that a run is a job of."""

    folder: Path
    """Its directory, absolute; what trackers know of the parent run is in `<folder>/tracking/`."""
    uid: str
    """Random, made once a sweep."""
    name: str
    """For people: date, time and id of its directory."""
    job: int
    """The run's number in it, from 0."""
    axes: tuple[str, ...] = ()
    """Keys that are swept."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run as trackers see it."""

    run_dir: Path
    """Absolute."""
    uid: str
    """Random, made once a run: whoever looks for it on a server finds exactly this one."""
    experiment: str
    name: str
    """For people: the job's overrides in a sweep, else date, time and id of its directory."""
    attempts: tuple[Attempt, ...]
    """In order; the last one is the current one. At least one."""
    sweep: Sweep | None = None

    @property
    def attempt(self) -> Attempt:
        """The current attempt."""
        return self.attempts[-1]


@dataclass(frozen=True, slots=True)
class Finish:
    """How the run ended."""

    status: Ending
    error: str | None = None
    """Type and message of what ended it, secrets masked."""
    exit_code: int = 0
    """0: finished or stopped as asked; 1: failed; 130: interrupted; 137: killed."""


class RefusedError(Exception):
    """The service will never take this: what is sent is left out with one warning, and the rest goes on."""


class UnusableError(Exception):
    """Nothing can be sent with these settings (a malformed address, a deleted experiment): trying again is in vain."""


class LostError(Exception):
    """The service no longer has records that it had taken: they are sent again, from the one at `index` on.

    Every call may raise it; it is no trouble, and the call comes again when they have been sent.
    """

    def __init__(self, index: int) -> None:
        super().__init__(f"the records from {index} on are sent again")
        self.index = index


class Tracker(ABC):
    """One service, in a process of its own (or in `sync.py`). It may block, and raise whatever its library raises.

    `RefusedError` and `UnusableError` are final; any other `Exception` means: not now, the same call is tried again
    later. Every call may therefore come again after it failed half-way, also in a new process; what must not be done
    twice is kept in `memory`, which is written to disk after each call that returned.

    Args:
        options: the hook's options, by name.
        run: of which it is told.
        memory: what it wrote there itself, earlier; plain JSON, changed in place.
    """

    kind: ClassVar[str]
    """`mlflow`, `wandb` or `tensorboard`."""

    def __init__(self, options: dict[str, Any], run: Run, memory: dict[str, Any]) -> None:
        self.options, self.run, self.memory = options, run, memory

    @abstractmethod
    def open(self) -> None:
        """Make the run at the service, or find it again, and describe the attempts that are not described yet."""

    @abstractmethod
    def send(self, records: Sequence[Record]) -> None:
        """Send records, in their order: all of them, or raise."""

    def rewound(self, index: int, iteration: int, cut: Sequence[Record]) -> int:
        """Records that were sent were cut from the log, since the run was resumed before them; called before `open`.

        Args:
            index: of the first record that will be sent now.
            iteration: at which the run went on.
            cut: the records that were cut, and sent, of all cuts since, in their order.

        Returns:
            The index of the first record to be sent now, at most `index`.
        """
        return index

    def idle(self) -> None:
        """There is nothing to send; called about every second. The place to send files that have appeared."""

    @abstractmethod
    def finish(self, finish: Finish) -> None:
        """All records are sent: close the run with its status, `result.json` and whatever belongs to its end."""

    def close(self) -> None:
        """Let go of everything; nothing is sent any more. Called always, also after errors; must not raise."""

    @property
    def where(self) -> str | None:
        """Where a person finds the run (an address, or a command that shows it); None while that is not known."""
        return None
