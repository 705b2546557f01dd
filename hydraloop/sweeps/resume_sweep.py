"""`sweep.resume`: which sweep a command line continues. Jobs that have ended are not run again, new ones are added."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hydraloop.config.checks import hydra_config
from hydraloop.errors import UserError
from hydraloop.files.changes import differences
from hydraloop.files.result import PAUSE
from hydraloop.files.run_directory import check_links
from hydraloop.launch.plan import is_constant
from hydraloop.sweeps import job_states, sweep_directory
from hydraloop.sweeps.axes import Lines
from hydraloop.sweeps.check_sweep import SweepDraft
from hydraloop.sweeps.sweep_directory import FILENAME, Description, Jobs, SweepDirectory

MULTIRUN = Path("multirun")
"""Sweeps, as `multirun/<date>/<time>-<id>`."""
_KEY = "sweep.resume"
_SHOWN = 5
"""Differences that an error shows. More do not help."""


_Opened = tuple[SweepDirectory, Mapping[int, Lines]]


def open_sweep(description: Description, draft: SweepDraft) -> _Opened:
    """Create the directory of a sweep, or open the one that `sweep.resume` names. A second controller is refused here.

    Args:
        description: of a new sweep.

    Returns:
        The directory, whose lock this process has; and of a grid, the overrides of the jobs that this command line
        names, not masked, by number.

    Raises:
        UserError: there is nothing to resume, it is another sweep, or it has a controller; or a new directory is used.
    """
    with hydra_config(draft.cfg):
        path = Path(draft.cfg.hydra.sweep.dir).absolute()
    wanted = draft.options.resume
    if wanted == "auto" and not ("hydra.sweep.dir" in draft.typed or is_constant(draft.master.hydra.sweep)):
        return _resume(_newest(description, draft), description, draft)
    if wanted == "auto" and not (path / FILENAME).exists():
        wanted = None
        print(f"{path} had no sweep: a new one starts there", file=sys.stderr)
    if wanted is None:
        return _create(path, description, draft)
    return _resume(path if wanted == "auto" else Path(wanted), description, draft)


def _create(path: Path, description: Description, draft: SweepDraft) -> _Opened:
    directory = SweepDirectory.create(path, description)
    directory.controller_lock.acquire()
    return directory, dict(enumerate(draft.jobs.listed))


def _resume(path: Path, description: Description, draft: SweepDraft) -> _Opened:
    """Return a sweep with the jobs of this command line, which it gets if they are new."""
    directory = SweepDirectory.load(path, key=_KEY)  # no lock is left in a directory without a sweep
    check_links(path, key=_KEY)
    directory.controller_lock.acquire()
    try:
        for part in (*path.glob(".*.[0-9]*.part"), *path.glob(f"*/.{job_states.FILENAME}.*.part")):
            part.unlink()  # of a killed controller
        directory.description = old = sweep_directory.read_description(path, key=_KEY)
        new, named = _joined(directory, description, draft)
        if (new.jobs.masked(), new.average, new.configs) != (old.jobs, old.average, old.configs):
            directory.widen(new)
    except BaseException:
        directory.controller_lock.release()
        raise
    return directory, named


def _joined(directory: SweepDirectory, new: Description, draft: SweepDraft) -> tuple[Description, Mapping[int, Lines]]:
    """Return the description of a sweep with the jobs that this command line adds, and those that it names.

    Raises:
        UserError: the command line has another config, or no job of the sweep.
    """
    old = directory.description
    jobs, named = _joined_jobs(directory, draft.jobs)
    now = draft.configs(jobs)
    changes = [
        f"{choice}: {change}" if choice else str(change)
        for choice, config in old.configs.items()
        for change in differences(config, now.get(choice, {}))
        if change.key != PAUSE
    ]
    if changes:
        shown = "; ".join(changes[:_SHOWN]) + ("; …" if len(changes) > _SHOWN else "")
        remedy = f"Leave out what has changed, or start a new sweep without {_KEY}."
        raise UserError(f"the config of the sweep has changed: {shown}", key=_KEY, remedy=remedy)
    return replace(new, jobs=jobs, configs=now), named


def _joined_jobs(directory: SweepDirectory, new: Jobs) -> tuple[Jobs, Mapping[int, Lines]]:
    old = directory.description.jobs
    if old.search is not None and new.search is not None:
        new.search.check_same(old.search)
        trials = max(new.search.trials, directory.count // new.search.repeats)
        return Jobs.of_search(replace(new.search, trials=trials)), {}
    if old.search is not None or new.search is not None:
        kind = "a grid, without sweep.trials" if old.search is None else "a search, with sweep.trials"
        raise UserError(f"the sweep is {kind}", key=_KEY, remedy=f"Continue it so, or leave {_KEY} out.")
    jobs, named = old.joined(new)
    if min(named) >= old.count:
        first, other = (" ".join(lines) for lines in (old.listed[0], new.masked().listed[0]))
        problem = f"this command line has no job of the sweep, whose first job is {first}, not {other}"
        raise UserError(problem, key=_KEY, remedy=f"Give the same keys. To start a new sweep, leave {_KEY} out.")
    return jobs, named


def _newest(new: Description, draft: SweepDraft) -> Path:
    """Return the newest sweep with the config of this command line, and no other jobs."""
    for directory in sorted(_all(), key=lambda found: found.description.created, reverse=True):
        with suppress(UserError):
            _, named = _joined(directory, new, draft)
            if len(named.keys() & range(directory.description.jobs.count)) == len(directory.description.jobs.listed):
                return directory.path
    raise UserError(
        f"no sweep in {MULTIRUN}/ has this config and no other jobs",
        key=_KEY,
        remedy=f"Name its directory, {_KEY}={MULTIRUN}/<date>/<sweep>, to see the difference. Or leave {_KEY} out.",
    )


def _all() -> Iterator[SweepDirectory]:
    for folder, below, files in os.walk(MULTIRUN):
        if FILENAME in files:
            below.clear()  # the jobs
            with suppress(UserError):  # a damaged one
                yield SweepDirectory.load(Path(folder))
