"""The protocol of executors. They start and end processes, and know nothing of states."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol, Self


@dataclass(frozen=True, slots=True)
class Request:
    """A job to start. A fork gets it through a pipe. Another process gets it in a file, where secrets are masked."""

    number: int
    lines: tuple[str, ...]
    """Its overrides, not masked."""
    folder: str
    """Where its log is."""
    run_dir: str
    attempt: int = 1
    """How often it was started, with this time."""
    gpus: tuple[str, ...] | None = None
    """For CUDA_VISIBLE_DEVICES. None: unchanged."""
    threads: int | None = None
    """For tensor operations on a CPU. None: unchanged."""

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Return the request that `dataclasses.asdict` and JSON have made into lists and mappings."""
        lists: dict[str, Any] = {name: tuple(value) for name, value in content.items() if isinstance(value, list)}
        return cls(**{**content, **lists})

    def variables(self) -> dict[str, str]:
        """Return the environment variables for the GPUs and the threads of the job and of its ranks."""
        variables = {}
        if self.gpus is not None:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)
        if self.threads is not None:
            variables["OMP_NUM_THREADS"] = str(self.threads)
        return variables


class Cause(Enum):
    """What has ended the process of a job."""

    PROCESS = auto()
    """It has ended by itself, or a signal has ended it."""
    LOST = auto()
    """Its machine was lost, or the process that had started it."""
    SCHEDULER = auto()
    """A scheduler has preempted it, or has ended it because of its time limit."""
    CANCELLED = auto()
    """A user or an administrator has told the scheduler to end it. It is not retried."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A process of a job that has ended."""

    number: int
    code: int | None
    """As of a single run, or `UNUSABLE`. Negative: killed by that signal. None: unknown, as it was not a child."""
    cause: Cause = Cause.PROCESS


class Executor(Protocol):
    """Runs the processes of jobs."""

    def wait_ready(self) -> None:
        """Wait until jobs can start without delay.

        Raises:
            UserError: none can be started here.
        """

    def adopt(self) -> list[int]:
        """Take over the jobs of an earlier controller that still run, and return them. `poll` returns their ends."""
        return []

    def submit(self, request: Request) -> None:
        """Start a job.

        Raises:
            UserError: no job can be started here, as on a machine that is out of memory.
        """

    def poll(self, seconds: float) -> list[Ended]:
        """Wait at most some seconds, and return the processes that have ended. The controller sleeps only here."""

    def cancel(self, number: int, sign: signal.Signals) -> None:
        """Send a signal to a running job. SIGKILL also ends its children."""

    def close(self) -> None:
        """Start no further job. Running jobs save and end, unless a scheduler has them."""


class Worker(Protocol):
    """What the processes of the pool run. The fork server inherits it: nothing of it is pickled."""

    def prepare(self) -> None:
        """Import what jobs need. Called in the fork server, which runs no tensor operation and starts no thread."""

    def run(self, request: Request) -> int:
        """Run a job and return the exit code. Called in the job's process, which has a separate session."""
