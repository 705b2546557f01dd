"""Jobs: where a sweep's jobs come from, and the state of each in `job.json`.

A job without the file is queued. Only the controller of the sweep writes it.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from hydraloop.files import atomic, lock
from hydraloop.files.atomic import read_json
from hydraloop.files.checkpoint_files import END_UNWRITTEN, candidates
from hydraloop.files.config_yaml import plain
from hydraloop.files.result import FILENAME as RESULT
from hydraloop.files.result import PAUSE, PREEMPTED, Best, Result
from hydraloop.files.run_directory import checkpoint_folders

State = Literal["queued", "running", "finished", "failed", "stopped", "interrupted", "paused", "pruned"]
"""`stopped`: training stopped early by a hook. `interrupted`: by a signal, a preemption or a kill; a resumed sweep
continues it. `paused`: by `engine.pause_after`; the job has saved, and continues when the sweep or its search starts it
again. `pruned`: by the optimizer of the sweep."""

FILENAME = "job.json"
_FULL = (f"[Errno {errno.ENOSPC}]", f"[Errno {errno.EDQUOT}]", END_UNWRITTEN)
"""In errors that are not the job's, or a rank's: it continues when there is space again."""
LOG = "job.log"
"""What the job's processes have printed."""
REQUEST = "request.json"
"""What a new Python process is to run. Without the file, it exits."""


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
    began: float | None = None
    """Seconds since 1970 at the start of the last attempt. Slurm may have let it wait since."""
    ended: float | None = None
    seconds: float = 0.0
    """Wall-clock time of all attempts that have ended."""
    error: str | None = None
    reason: str | None = None
    """Why it stopped, was interrupted, paused or pruned."""
    metric: str | None = None
    """The monitored metric; it and the next three are the objective in `result.json`."""
    rule: Literal["greater", "less"] | None = None
    """Which values of it are better."""
    value: float | None = None
    """Hydra's return value."""
    step: int | None = None
    """Iterations at that value."""
    checkpoint: str | None = None
    """The best checkpoint, else the newest; relative to the run directory."""
    iterations: int = 0
    """Completed iterations when an attempt last wrote its result."""
    earlier_result: str | None = None
    """Digest of `result.json` when the attempt began: such a file is not the outcome of this attempt."""
    params: Mapping[str, float | int | str] | None = None
    """In a search: the values of its trial, see `space.Params`. They are written before the job starts."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """In a search: what the sampler has noted of the trial."""
    rungs: tuple[float, ...] = ()
    """With `sweep.promote`: the objective at each rung that the job has left."""

    @property
    def is_over(self) -> bool:
        """Whether the job has an outcome. An interrupted or paused job has none yet."""
        return self.state in ("finished", "failed", "stopped", "pruned")

    @property
    def is_left(self) -> bool:
        """Whether its controller does not start it again after this attempt, because it is over or paused."""
        return self.is_over or self.state == "paused"

    @property
    def preempted_by(self) -> str | None:
        """What has preempted the job, which has saved: the name of a signal, or a time limit. None if nothing has."""
        reason = self.reason or ""
        is_preempted = self.state == "interrupted" and reason.startswith(PREEMPTED)
        return reason.removeprefix(PREEMPTED) if is_preempted else None

    @property
    def has_diverged(self) -> bool:
        """Whether it has failed with NaN as its objective: another attempt would do the same."""
        return self.state == "failed" and self.value is not None and math.isnan(self.value)


def read(folder: Path) -> JobState | None:
    """Return the state in a folder; None if the file does not exist, is damaged, or belongs to another program."""
    try:
        found = read_json(folder / FILENAME)
        value = found["value"]
        lists = {"overrides": tuple(found["overrides"]), "rungs": tuple(map(float, found["rungs"]))}
        return JobState(**{**found, **lists, "value": None if value is None else float(value)})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write(folder: Path, state: JobState, *, flush: bool) -> None:
    """Replace the state atomically.

    Args:
        flush: whether to wait until it is on the disk. Needed for an end that `result.json` does not tell.

    Raises:
        OSError: it cannot be written.
    """
    text = json.dumps(
        {**asdict(state), "value": plain(state.value), "rungs": plain(list(state.rungs))}, allow_nan=False
    )
    atomic.write_text(folder / FILENAME, text + "\n", flush=flush)


def ended_from_result(state: JobState, run_dir: Path) -> JobState | None:
    """Return the end of an attempt by its `result.json`; None if the attempt has not written that file."""
    found = Result.read(run_dir, earlier=state.earlier_result)
    if found is None:
        return None
    iterations = found.progress.get("iteration", state.iterations)
    told = replace(state, state=found.status, error=found.error, reason=found.reason, iterations=iterations)
    if (told.preempted_by or "").startswith(PAUSE):
        told = replace(told, state="paused")
    if told.state == "failed" and any(mark in (told.error or "") for mark in _FULL):
        told = replace(told, state="interrupted")
    if told.state == "interrupted" and told.reason is None:
        told = replace(told, error=None, reason=told.error)
    if found.objective is not None:
        goal = found.objective
        told = replace(told, metric=goal.metric, rule=goal.rule, value=goal.value, step=goal.iteration)
    try:
        ended = (run_dir / RESULT).stat().st_mtime
    except OSError:
        return None
    return end(replace(told, checkpoint=_checkpoint(found.best, run_dir)), ended, found.seconds)


def end(state: JobState, ended: float, seconds: float) -> JobState:
    """Return a state with the time at which its attempt has ended, and the seconds of all attempts."""
    return replace(state, ended=ended, seconds=state.seconds + seconds)


def _checkpoint(best: Best | None, run_dir: Path) -> str | None:
    """Return the best checkpoint, else the newest, relative to the run directory."""
    newest = candidates(*checkpoint_folders(run_dir))[:1] if best is None else [Path(best.checkpoint)]
    return os.path.relpath(newest[0], run_dir) if newest else None


def current(state: JobState, run_dir: Path) -> JobState:
    """Return the state of a job or run for readers: one whose process was killed is not running."""
    if state.state != "running" or lock.holder(run_dir) is not None:
        return state
    return ended_from_result(state, run_dir) or replace(state, state="interrupted", reason="its process was killed")


@dataclass(frozen=True, slots=True)
class Job:
    """A job that a source gives."""

    number: int
    lines: tuple[str, ...]
    """Its overrides, not masked."""


class Source(Protocol):
    """Gives each job that is not over once, and a paused job again. A resumed sweep has a new source."""

    @property
    def numbers(self) -> Sequence[int]:
        """The jobs that are to be over at the end."""

    def next_job(self) -> Job | None:
        """Return another job; None if all jobs are given out, or a running job must end first."""

    def ended(self, state: JobState) -> None:
        """Called when a job is over, paused or not started again, and at first for each such job of the directory."""

    def look(self, running: Iterable[JobState]) -> Mapping[int, str]:
        """Called several times a second. Return the jobs that are to end as pruned, with the reasons.

        Args:
            running: the jobs that this controller answers for.
        """


class Grid(Source):
    """Gives the jobs of a grid in the order of their numbers.

    Args:
        jobs: the overrides of the jobs that the command line names, not masked, by number.
    """

    def __init__(self, jobs: Mapping[int, tuple[str, ...]]) -> None:
        self._jobs = dict(sorted(jobs.items()))
        self._numbers = tuple(self._jobs)

    @property
    def numbers(self) -> Sequence[int]:
        """The jobs that the command line names."""
        return self._numbers

    def next_job(self) -> Job | None:
        """Return the next job that is not over."""
        for number in self._jobs:
            return Job(number, self._jobs.pop(number))
        return None

    def ended(self, state: JobState) -> None:
        """Note that a job is over, or was interrupted and is not started again."""
        if state.is_over or state.state == "interrupted":
            self._jobs.pop(state.number, None)

    def look(self, running: Iterable[JobState]) -> Mapping[int, str]:
        """Return no job."""
        return {}
