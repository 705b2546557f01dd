"""SweepDirectory: `sweep.json`, the folders with states of jobs, and the lock of its controller."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Self

from hydraloop.errors import UserError
from hydraloop.files import lock
from hydraloop.files.environment import shown
from hydraloop.files.lock import Holder
from hydraloop.files.result import PAUSE
from hydraloop.files.run_directory import holds_run
from hydraloop.files.terminal import brief
from hydraloop.sweeps import job_states, sweep_description
from hydraloop.sweeps.axes import key_of
from hydraloop.sweeps.job_states import JobState
from hydraloop.sweeps.sweep_description import Description
from hydraloop.tracking.tracker import valid_utf8

_NUMBERED = "${hydra.job.num}"
"""Hydra's default of `hydra.sweep.subdir`."""


class SweepDirectory:
    """The directory of a sweep.

    Args:
        path: absolute.
    """

    def __init__(self, path: Path, description: Description) -> None:
        self.path, self.description = path, description
        self.controller_lock = lock.RunLock(path, key="sweep.resume")
        """Held by the controller, which alone starts jobs and changes `sweep.json`. A second controller is refused."""

    @classmethod
    def create(cls, path: Path, new: Description) -> Self:
        """Write `sweep.json`, with secrets masked.

        Raises:
            UserError: it cannot be written, or the directory holds a sweep or a run.
        """
        if (path / sweep_description.FILENAME).exists():
            raise _held(path)
        if holds_run(path):
            raise UserError(
                f"{shown(path)} holds a run already", key="hydra.sweep.dir", remedy="Name another directory."
            )
        made = cls(path, new.masked())
        with lock.RunLock(path, key="hydra.sweep.dir"):
            if (path / sweep_description.FILENAME).exists():  # another process was faster
                raise _held(path)
            try:
                made.description.write(path)
            except OSError as error:
                raise _unwritable(path, error) from error
        return made

    @classmethod
    def load(cls, path: Path, *, key: str | None = None) -> Self:
        """Return the sweep in a directory. Arguments and errors: as in `sweep_description.read`."""
        return cls(path.absolute(), sweep_description.read(path, key=key))

    def widen(self, new: Description) -> None:
        """Replace the jobs, the overrides as typed, the configs and the averaged key.

        Raises:
            UserError: `sweep.json` cannot be written.
        """
        self.description = replace(
            self.description, jobs=new.jobs, overrides=new.overrides, configs=new.configs, average=new.average
        ).masked()
        try:
            self.description.write(self.path)
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def folder(self, number: int) -> Path:
        """Return where the state and the log of a job are."""
        return self.path / self._folder(number)

    def _folder(self, number: int) -> str:
        """Return the run directory of a job, if that is named after the number; else `.jobs/<number>`."""
        return str(number) if self.has_numbered_jobs else f".jobs/{number}"

    @property
    def has_numbered_jobs(self) -> bool:
        """Whether the run directories of jobs are named after their numbers."""
        return self.description.subdir == _NUMBERED

    @property
    def count(self) -> int:
        """The number of jobs, without those that a search has not asked for."""
        search = self.description.jobs.search
        if search is None:
            return self.description.jobs.count
        parent = self.folder(0).parent
        names = os.listdir(parent) if parent.exists() else []
        for number in sorted(map(int, filter(str.isdecimal, names)), reverse=True):
            if (self.folder(number) / job_states.FILENAME).exists():
                return (number // search.repeats + 1) * search.repeats
        return 0

    def lines(self, state: JobState) -> tuple[str, ...]:
        """Return the overrides of a job, masked."""
        jobs = self.description.jobs
        if jobs.search is None:
            return jobs.listed[state.number]
        return tuple(line for line in state.overrides if key_of(line) != PAUSE)

    def swept(self, state: JobState) -> dict[str, str]:
        """Return the swept keys and their values in a job, as typed."""
        lines = self.description.jobs.swept_lines(self.lines(state))
        return {key_of(line): valid_utf8(line.partition("=")[2]) for line in lines}

    def name(self, number: int) -> str:
        """Return the name of a job for people: `job 3 (optimizer.lr=1e-3 seed=1)`."""
        swept = " ".join(self.description.jobs.swept_lines(self.lines(self.state(number))))
        return f"job {number} ({brief(swept)})" if swept else f"job {number}"

    def resume_command(self, found: Iterable[JobState]) -> str:
        """Return the command line that continues the sweep, whose directory is named by `sweep.resume` only.

        Args:
            found: the states of its jobs. If all that are not over are paused, they continue to the end.
        """
        left = {state.state for state in found if not state.is_over}
        named = ("sweep.resume=", "hydra.sweep.dir=", *([f"{PAUSE}="] if left == {"paused"} else []))
        overrides = [line for line in self.description.overrides if not line.startswith(named)]
        return shlex.join([*self.description.command, *overrides, f"sweep.resume={shown(self.path)}"])

    def run_dir(self, state: JobState) -> Path:
        """Return the run directory of a job; before that is known, its folder."""
        return self.path / state.directory

    def state(self, number: int) -> JobState:
        """Return the state of a job; `queued` if it was never started.

        A job whose file is damaged has ended if `result.json` says so; otherwise it was interrupted.
        """
        folder = self.folder(number)
        found = job_states.read(folder)
        if found is not None:
            return found
        jobs = self.description.jobs
        lines = jobs.listed[number] if jobs.search is None else ()
        queued = JobState(number, "queued", lines, directory=self._folder(number))
        if not (folder / job_states.FILENAME).exists():
            return queued
        lost = replace(queued, state="interrupted", attempts=1, reason=f"its {job_states.FILENAME} was damaged")
        return job_states.ended_from_result(lost, folder) or lost

    def states(self) -> list[JobState]:
        """Return the states of all jobs, queued ones too. 10,000 take 0.2 s."""
        return [self.state(number) for number in range(self.count)]

    def write(self, state: JobState, *, flush: bool = True) -> None:
        """Replace the state of a job, as `states.write` does. The process must have the lock of the sweep."""
        folder = self.folder(state.number)
        folder.mkdir(parents=True, exist_ok=True)
        job_states.write(folder, state, flush=flush)

    def holder(self) -> Holder | None:
        """Return the controller; None if none is alive."""
        return lock.holder(self.path)


def _held(path: Path) -> UserError:
    option = shlex.quote(f"sweep.resume={shown(path)}")
    remedy = f"Name another directory, or continue the sweep: {option}"
    return UserError(f"{shown(path)} holds a sweep already", key="hydra.sweep.dir", remedy=remedy)


def _unwritable(path: Path, error: OSError) -> UserError:
    problem = f"{path} cannot be written: {error.strerror}"
    remedy = "Free some space, or name another directory."
    return UserError(problem, key="hydra.sweep.dir", remedy=remedy)
