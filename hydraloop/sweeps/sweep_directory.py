"""The directory of a sweep: `sweep.json`, the folders with the states of jobs, and the lock of the controller."""

from __future__ import annotations

import json
import os
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from hydraloop.errors import UserError, missing_path
from hydraloop.files import atomic, lock
from hydraloop.files.atomic import read_json
from hydraloop.files.environment import shown
from hydraloop.files.lock import Holder
from hydraloop.files.result import PAUSE
from hydraloop.files.run_directory import holds_run
from hydraloop.files.secrets import mask_overrides
from hydraloop.files.terminal import brief
from hydraloop.sweeps import job_states
from hydraloop.sweeps.axes import Axis, Lines, jobs_of, key_of
from hydraloop.sweeps.job_states import JobState
from hydraloop.sweeps.search import Search
from hydraloop.tracking.tracker import valid_utf8

FILENAME = "sweep.json"
LONGEST = 1000
"""Characters of a command that is shown. One with thousands of values cannot be read or pasted."""


@dataclass(frozen=True, slots=True)
class Jobs:
    """The jobs of a grid, or the search that asks for jobs. Secrets are masked in `sweep.json`."""

    listed: tuple[Lines, ...]
    """The overrides of each job. Of a search: none. What its jobs set is in their own files."""
    swept: tuple[str, ...]
    """The keys that differ between jobs."""
    search: Search | None = None

    @classmethod
    def of_axes(cls, axes: Sequence[Axis]) -> Jobs:
        """Return the jobs of a grid."""
        swept = dict.fromkeys(key for axis in axes if len(axis.values) > 1 for key in axis.keys)
        return cls(tuple(jobs_of(axes)), tuple(swept))

    @classmethod
    def of_search(cls, search: Search) -> Jobs:
        """Return the jobs of a search."""
        return cls((), search.space.swept, search)

    @property
    def count(self) -> int:
        """The number of jobs. Of a search: also those that it has not asked for."""
        return len(self.listed) if self.search is None else self.search.trials * self.search.repeats

    def masked(self) -> Jobs:
        """Return the jobs with secrets masked."""
        search = None if self.search is None else self.search.masked()
        return Jobs(tuple(tuple(mask_overrides(lines)) for lines in self.listed), self.swept, search)

    def title(self, known: int) -> str:
        """Return the number of jobs, or of trials, before the numbers of jobs by their state.

        Args:
            known: the number of jobs, without those that a search has not asked for.
        """
        if self.search is None:
            return f"{known:,} jobs"
        return f"{-(-known // self.search.repeats):,} of {self.search.trials:,} trials; jobs"

    def swept_lines(self, lines: Sequence[str]) -> list[str]:
        """Return the overrides of a job that other jobs do not have."""
        return [line for line in lines if key_of(line) in self.swept]

    def joined(self, new: Jobs) -> tuple[Jobs, dict[int, Lines]]:
        """Return the jobs of this sweep, masked, and those of a command line, which are not.

        Jobs with the same overrides are the same, in any order and with any `engine.pause_after` that is not swept;
        the same job twice is two jobs. New jobs get the highest numbers.

        Returns:
            The jobs, with those that the command line does not name, and the overrides of those that it names.
        """
        swept = tuple(dict.fromkeys((*self.swept, *new.swept)))
        places = {identity: number for number, identity in enumerate(_identities(self.listed, swept))}
        listed, named = list(self.listed), dict[int, Lines]()
        for lines, identity in zip(new.listed, _identities(new.masked().listed, swept), strict=True):
            number = places.setdefault(identity, len(listed))
            listed[number : number + 1] = [lines]
            named[number] = lines
        return Jobs(tuple(listed), _varied(listed, swept)), named

    @classmethod
    def from_json(cls, content: Any) -> Jobs:
        """Return what `dataclasses.asdict` and JSON have made into lists and mappings."""
        search = None if content["search"] is None else Search.from_json(content["search"])
        return cls(tuple(map(tuple, content["listed"])), tuple(content["swept"]), search)


def _identities(listed: Sequence[Lines], swept: Sequence[str]) -> list[tuple[Lines, int]]:
    """Return what is equal for equal jobs, and how many equal jobs there are before each."""
    seen, found = Counter[Lines](), []
    for lines in listed:
        identity = tuple(sorted(line for line in lines if key_of(line) != PAUSE or PAUSE in swept))
        found.append((identity, seen[identity]))
        seen[identity] += 1
    return found


def _varied(listed: Sequence[Lines], swept: Sequence[str]) -> tuple[str, ...]:
    """Return the keys that are swept, and those that only some jobs set, or with different values."""
    counts = Counter(line for lines in listed for line in lines)
    others = [key_of(line) for line, count in counts.items() if count < len(listed)]
    return tuple(dict.fromkeys([*swept, *(key for key in others if key != PAUSE)]))


@dataclass(frozen=True, slots=True)
class Description:
    """The contents of `sweep.json`. Secrets are masked."""

    uid: str
    created: float
    """Seconds since 1970."""
    command: tuple[str, ...]
    """`("python", "train.py")`, and Hydra's flags."""
    overrides: tuple[str, ...]
    """As typed, with axes."""
    configs: Mapping[str, Mapping[str, Any]]
    """What must not change when the sweep is resumed, see `SweepDraft.configs`."""
    subdir: str
    """`hydra.sweep.subdir`, not resolved."""
    jobs: Jobs
    average: str
    """The key over which results are averaged."""
    git: dict[str, Any]
    """`commit`, and `dirty`: whether tracked files differed from it."""

    @property
    def averaged(self) -> str | None:
        """The key over which results are averaged; None if it is not swept."""
        return self.average if self.average in self.jobs.swept else None

    def masked(self) -> Description:
        """Return the description with secrets masked."""
        overrides, command = (tuple(mask_overrides(lines)) for lines in (self.overrides, self.command))
        return replace(self, jobs=self.jobs.masked(), overrides=overrides, command=command)

    def write(self, folder: Path) -> None:
        """Write the file atomically.

        Raises:
            OSError: it cannot be written.
        """
        content = {**asdict(replace(self, jobs=Jobs((), ()))), "jobs": asdict(self.jobs)}
        atomic.write_text(folder / FILENAME, json.dumps(content) + "\n")


def read_description(folder: Path, *, key: str | None = None) -> Description:
    """Read the file.

    Args:
        folder: the directory of a sweep.
        key: the option that has named it.

    Raises:
        UserError: the directory holds no sweep.
    """
    try:
        content = read_json(folder / FILENAME)
        lists = {name: tuple(content[name]) for name in ("command", "overrides")}
        return Description(**{**content, **lists, "jobs": Jobs.from_json(content["jobs"])})
    except FileNotFoundError:
        problem: str = "is not the directory of a sweep"
        remedy: str = missing_path(folder, "Name one, multirun/<date>/<sweep>.")
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        problem = f"has a damaged {FILENAME}"
        remedy = "Copy that file again, or start a new sweep. The results of its jobs are in their result.json."
    raise UserError(f"{folder} {problem}", key=key, remedy=remedy)


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
        if (path / FILENAME).exists():
            raise _held(path)
        if holds_run(path):
            raise UserError(
                f"{shown(path)} holds a run already", key="hydra.sweep.dir", remedy="Name another directory."
            )
        made = cls(path, new.masked())
        with lock.RunLock(path, key="hydra.sweep.dir"):
            if (path / FILENAME).exists():  # another process was faster
                raise _held(path)
            try:
                made.description.write(path)
            except OSError as error:
                raise _unwritable(path, error) from error
        return made

    @classmethod
    def load(cls, path: Path, *, key: str | None = None) -> Self:
        """Return the sweep in a directory. Arguments and errors: as in `read_description`."""
        return cls(path.absolute(), read_description(path, key=key))

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

        A very long command line is only referred to.

        Args:
            found: the states of its jobs. If all that are not over are paused, they continue to the end.
        """
        left = {state.state for state in found if not state.is_over}
        named = ("sweep.resume=", "hydra.sweep.dir=", *([f"{PAUSE}="] if left == {"paused"} else []))
        overrides = [line for line in self.description.overrides if not line.startswith(named)]
        resume = f"sweep.resume={shown(self.path)}"
        command = shlex.join([*self.description.command, *overrides, resume])
        return command if len(command) <= LONGEST else f"<the same command> {shlex.quote(resume)}"

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
