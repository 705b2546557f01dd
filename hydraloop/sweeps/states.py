"""The state of a job, in `job.json`. The process of the job writes it; a job without the file is queued.

A process that has the lock of the job's folder, and only that one, writes the file. Therefore each job ends once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

State = Literal["queued", "running", "finished", "failed", "stopped", "interrupted", "pruned"]
"""`stopped`: training stopped early by a hook. `interrupted`: by a signal, a preemption or a kill; a resumed sweep
continues it. `pruned`: by the optimizer of the sweep."""

FILENAME = "job.json"
LOG = "job.log"
"""What the job's processes have printed."""


@dataclass(frozen=True, slots=True)
class JobState:
    """The contents of `job.json`. Secrets are masked."""

    number: int
    state: State
    overrides: tuple[str, ...] = ()
    attempts: int = 0
    """How often the job was started."""
    directory: str = ""
    """The run directory, relative to that of the sweep."""
    host: str = ""
    machine: str = ""
    """From `processes.machine`."""
    pid: int = 0
    since: float | None = None
    """The start of the process, from `processes.started`."""
    began: float | None = None
    """Seconds since 1970 at the start of the last attempt."""
    ended: float | None = None
    seconds: float = 0.0
    """Wall-clock time of all attempts that have ended."""
    error: str | None = None
    reason: str | None = None
    """Why it stopped or was interrupted."""
    metric: str | None = None
    """The monitored metric."""
    rule: Literal["greater", "less"] | None = None
    """Which values of it are better."""
    value: float | None = None
    """The best value, else that of the last validation: Hydra's return value."""
    step: int | None = None
    """Iterations at that value."""
    checkpoint: str | None = None
    """The best checkpoint, else the newest; relative to the run directory."""
    total: int | None = None
    """Iterations of the whole run, for its progress."""
    earlier_result: str | None = None
    """Checksum of `result.json` when the attempt began: such a file is not the outcome of this attempt."""
    gpus: tuple[str, ...] = ()

    @property
    def is_over(self) -> bool:
        """Whether the job has an outcome. An interrupted job has none yet."""
        return self.state in ("finished", "failed", "stopped", "pruned")


def read(folder: Path) -> JobState | None:
    """Return the state in a folder; None if there is none, or the file is not of this kind."""
    raise NotImplementedError


def write(folder: Path, state: JobState, *, flush: bool) -> None:
    """Replace the state atomically.

    Args:
        flush: whether to wait until it is on the disk. The end of a job is flushed, its start is not.

    Raises:
        OSError: it cannot be written.
    """
    raise NotImplementedError


def ended_from_result(state: JobState, run_dir: Path) -> JobState | None:
    """Return the state that `result.json` tells, for a job whose process was killed after it had written that file.

    None: the file is not of this attempt, or there is none.
    """
    raise NotImplementedError
