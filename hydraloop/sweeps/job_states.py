"""JobState: the contents of a job's `job.json`, and how each event changes them: a start, an end, a kill, pruning.

A job without the file is queued. Only the controller of the sweep writes the file.
"""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from hydraloop.files import atomic, lock
from hydraloop.files.atomic import read_json
from hydraloop.files.checkpoint_files import END_UNWRITTEN
from hydraloop.files.config_yaml import plain
from hydraloop.files.metrics_log import FILENAME as RECORDS
from hydraloop.files.result import FILENAME as RESULT
from hydraloop.files.result import PAUSE, Result, digest, preempted_by
from hydraloop.launch.exit import REQUEUE, signal_name

State = Literal["queued", "running", "finished", "failed", "stopped", "interrupted", "paused", "pruned"]
"""`queued`: the job was not started yet. `running`: it has a process, or waits in the queue of a scheduler.
`stopped`: by a hook, which has ended training early. `interrupted`: by a signal, a preemption or a kill, or by an error
if it has a retry left; a resumed sweep continues the job. `paused`: by `engine.pause_after`; the job has saved, and
continues when the sweep is resumed or promotes it. `pruned`: by the search."""

FILENAME = "job.json"
_DISK_FULL = (f"[Errno {errno.ENOSPC}]", f"[Errno {errno.EDQUOT}]", END_UNWRITTEN)
"""Parts of the errors of a full disk. Such a job is interrupted, not failed: it continues when the disk has space."""
_ENDING_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that users, schedulers and the kernel end a process with. Others mean a mistake in the program."""
LOG = "job.log"
"""File with what the processes of a job have printed."""
UNUSABLE = 74
"""Exit code of a job without a result whose directory is locked, or cannot be written: EX_IOERR of sysexits.h."""
REQUEST = "request.json"
"""File that tells a new Python process which job to run. Without the file, the process exits."""


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
    """Seconds since 1970 at the start of the last attempt. A job of Slurm may have waited in the queue since then."""
    seconds: float = 0.0
    """Wall-clock time of all attempts that have ended."""
    attempt_times: tuple[tuple[float, float], ...] = ()
    """The start and the end of each attempt that has ended, in seconds since 1970, without the wait in a queue."""
    error: str | None = None
    reason: str | None = None
    """Why it stopped, was interrupted, paused or pruned."""
    metric: str | None = None
    """The monitored metric. `metric`, `rule`, `value` and `step` are the objective in `result.json`."""
    rule: Literal["greater", "less"] | None = None
    """Whether greater or lesser values of the metric are better."""
    value: float | None = None
    """The value of the metric, which the sweep compares."""
    step: int | None = None
    """Completed iterations at that value."""
    checkpoint: str | None = None
    """The file of the best validation, relative to the run directory; None if it was not kept."""
    iterations: int = 0
    """Completed iterations when an attempt last wrote its result."""
    retries: int = 0
    """How many retries of `sweep.max_retries` the job has used, also under earlier controllers."""
    losses: int = 0
    """How often its machine or its controller was lost."""
    earlier_result: str | None = None
    """Digest of `result.json` when the attempt began. A file with this digest is not the outcome of the attempt."""
    params: Mapping[str, float | int | str] | None = None
    """In a search: the values of its trial, see `space.Params`. They are written before the job starts."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """In a search: what the sampler has noted of the trial."""
    rungs: tuple[float, ...] = ()
    """With `sweep.promote`: the objective at each rung from which the job was promoted."""

    @property
    def is_over(self) -> bool:
        """Whether the job has an outcome. Interrupted and paused jobs do not have one."""
        return self.state in ("finished", "failed", "stopped", "pruned")

    @property
    def preempted_by(self) -> str | None:
        """What has preempted the job: the name of a signal, or a time limit. None if it was not preempted."""
        return preempted_by(self.reason) if self.state == "interrupted" else None

    @property
    def has_diverged(self) -> bool:
        """Whether the job has failed with NaN as its objective. Another attempt would have the same loss."""
        return self.state == "failed" and self.value is not None and math.isnan(self.value)


def read(folder: Path) -> JobState | None:
    """Return the state in a folder; None if the file does not exist, is damaged, or belongs to another program."""
    try:
        content = read_json(folder / FILENAME)
        value = content["value"]
        lists = {"overrides": tuple(content["overrides"]), "rungs": tuple(map(float, content["rungs"]))}
        lists["attempt_times"] = tuple((float(start), float(end)) for start, end in content["attempt_times"])
        return JobState(**{**content, **lists, "value": None if value is None else float(value)})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write(folder: Path, state: JobState, *, flush: bool) -> None:
    """Replace the state atomically.

    Args:
        flush: whether to wait until the file is on the disk. Needed for a state that no other file has.

    Raises:
        OSError: it cannot be written.
    """
    text = json.dumps(
        {**asdict(state), "value": plain(state.value), "rungs": plain(list(state.rungs))}, allow_nan=False
    )
    atomic.write_text(folder / FILENAME, text + "\n", flush=flush)


def started(before: JobState, overrides: tuple[str, ...], sweep: Path, directory: str) -> JobState:
    """Return the state of a job whose next attempt starts now.

    Args:
        before: the state before the attempt.
        overrides: with secrets masked.
        sweep: the directory of the sweep.
        directory: the run directory, relative to `sweep`.
    """
    return JobState(
        number=before.number,
        state="running",
        overrides=overrides,
        attempts=before.attempts + 1,
        directory=directory,
        began=time.time(),
        seconds=before.seconds,
        attempt_times=before.attempt_times,
        iterations=before.iterations,
        retries=before.retries,
        losses=before.losses,
        earlier_result=digest(sweep / directory),
        params=before.params,
        notes=before.notes,
        rungs=before.rungs,
    )


def ended_from_result(running: JobState, run_dir: Path) -> JobState | None:
    """Return the state of a job after an attempt, by `result.json`; None if the attempt has not written that file."""
    result = Result.read(run_dir, earlier=running.earlier_result)
    if result is None:
        return None

    best = result.best_checkpoint
    seconds = result.seconds - result.earlier_seconds
    end = _last_written(run_dir / RESULT)
    start = max(running.began or 0.0, end - seconds)  # without the wait in a queue
    state = replace(
        running,
        state=result.status,
        error=result.error,
        reason=result.reason,
        iterations=result.progress.get("iteration", running.iterations),
        checkpoint=None if best is None else os.path.relpath(best, run_dir),
        seconds=running.seconds + seconds,
        attempt_times=(*running.attempt_times, (start, end)),
    )
    if result.objective is not None:
        state = replace(
            state,
            metric=result.objective.metric,
            rule=result.objective.rule,
            value=result.objective.value,
            step=result.objective.iteration,
        )

    # For a run, a pause is a preemption. For a sweep, it is the end of a rung: the job is not retried.
    if (state.preempted_by or "").startswith(PAUSE):
        return replace(state, state="paused")
    # A full disk is not a mistake of the job: a resumed sweep continues it.
    is_disk_full = state.state == "failed" and any(part in (state.error or "") for part in _DISK_FULL)
    return interrupted(state) if is_disk_full or state.state == "interrupted" else state


def ended_without_result(running: JobState, folder: Path, run_dir: Path, code: int | None) -> JobState:
    """Return the state of a job after an attempt whose process has ended and has written no result.

    Args:
        folder: where the log of the job is.
        code: the exit code of the process, negative for a signal; None if unknown.
    """
    # Without an exit code, the process may have ended long ago.
    ended = _last_written(folder / LOG, run_dir / RECORDS) if code is None else time.time()
    start = min(ended, running.began or ended)
    times = (*running.attempt_times, (start, ended))
    state = replace(running, seconds=running.seconds + ended - start, attempt_times=times)

    # A person, a scheduler or a lost machine has ended these jobs. They are interrupted, because they may succeed.
    if code is None:
        return replace(state, state="interrupted", reason="its process has ended without a result")
    if code == UNUSABLE:
        return replace(state, state="interrupted", reason=f"its directory could not be used; see {LOG}")
    if code == REQUEUE:
        return replace(state, state="interrupted", reason="it was ended before it could begin")
    number = -code if code < 0 else code - 128
    if number in _ENDING_SIGNALS:
        memory = " (out of memory?)" if number == signal.SIGKILL else ""
        return replace(state, state="interrupted", reason=f"killed by {signal.Signals(number).name}{memory}")

    # The program has ended by itself, or by a signal for its own mistake.
    how = f"crashed ({signal_name(-code)})" if code < 0 else f"ended with exit code {code} and no result"
    return replace(state, state="failed", error=f"its process {how}; see {LOG}")


def interrupted(state: JobState) -> JobState:
    """Return the state of a job that continues although its attempt has ended with an error, or by a signal."""
    return replace(state, state="interrupted", error=None, reason=state.reason or state.error)


def pruned_if_open(state: JobState, reason: str) -> JobState:
    """Return the state of a job that a search ends early. A running job and a job that is over keep their states."""
    is_open = state.state in ("queued", "paused", "interrupted")
    return replace(state, state="pruned", reason=reason) if is_open else state


def not_built(state: JobState) -> JobState:
    """Return the state of a job that a resumed sweep is to start, because no job of the sweep could be built."""
    if state.attempts == 0:
        return replace(state, state="queued", reason=None)
    return interrupted(state)


def current(state: JobState, run_dir: Path) -> JobState:
    """Return the state of a job or run without a controller: it is not running if its directory is not locked."""
    if state.state != "running" or lock.holder(run_dir) is not None:
        return state
    # Without a record, it may be a run that `hydraloop.build` has made, and that was not trained.
    reason = (
        "its process was killed" if (run_dir / RECORDS).exists() else "its process was killed, or it has not trained"
    )
    return ended_from_result(state, run_dir) or replace(state, state="interrupted", reason=reason)


def _last_written(*files: Path) -> float:
    """Return when one of these files was last written, in seconds since 1970. Without a file: the present time."""
    return max((path.stat().st_mtime for path in files if path.exists()), default=time.time())
