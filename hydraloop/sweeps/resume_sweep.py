"""`sweep.resume`: which sweep a command line continues. Jobs that have ended are not run again, new ones are added."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hydraloop.errors import UserError
from hydraloop.plan import is_constant
from hydraloop.run_files.changes import differences
from hydraloop.run_files.lock import RunLock
from hydraloop.run_files.result import PAUSE
from hydraloop.run_files.run_directory import check_links
from hydraloop.sweeps.axes import Axes
from hydraloop.sweeps.planning import SweepDraft
from hydraloop.sweeps.search.trials import Trials
from hydraloop.sweeps.sweep_description import FILENAME, Description
from hydraloop.sweeps.sweep_directory import SweepDirectory
from hydraloop.validate.config import hydra_config

MULTIRUN = Path("multirun")
"""Sweeps, as `multirun/<date>/<time>-<id>`."""
_KEY = "sweep.resume"
_SHOWN = 5
"""Differences that an error shows. More do not help."""
_PATIENCE = 10.0
"""Seconds that a controller waits for another one that widens the same sweep."""


def join(description: Description, draft: SweepDraft) -> tuple[SweepDirectory, Axes | Trials]:
    """Return the directory of the sweep that `sweep.resume` names, and its jobs, for one of many controllers.

    They start at the same time, and add no job: so none of them locks the directory.

    Raises:
        UserError: as of `settle`.
    """
    directory = SweepDirectory.load(Path(draft.options.resume), key=_KEY)
    return directory, _same_jobs(directory.description, description, draft).axes


def settle(description: Description, draft: SweepDraft) -> tuple[SweepDirectory, Axes | Trials]:
    """Return the directory of a sweep, a new one or the one that `sweep.resume` names, and its jobs, not masked.

    Args:
        description: of a new sweep.

    Raises:
        UserError: there is nothing to resume, or it is another sweep; or a new directory is in use.
    """
    with hydra_config(draft.cfg):
        path = Path(draft.cfg.hydra.sweep.dir).absolute()
    wanted, named = draft.options.resume, "hydra.sweep.dir" in draft.typed
    if wanted is None:
        return SweepDirectory.create(path, description), draft.axes
    if wanted == "auto" and not (named or is_constant(draft.master.hydra.sweep)):
        return _continued(_newest(description, draft), description, draft)
    if wanted == "auto":
        try:
            directory = SweepDirectory.create(path, description)
        except UserError:
            if not (path / FILENAME).exists():
                raise
        else:
            print(f"{path} had no sweep: a new one starts there", file=sys.stderr)
            return directory, draft.axes
    found = path if wanted == "auto" else Path(wanted)
    if named and found.resolve() != path.resolve():
        remedy = f"Leave hydra.sweep.dir out: {_KEY}={found}"
        raise UserError(f"a resumed sweep continues in its directory, {found}", key="hydra.sweep.dir", remedy=remedy)
    return _continued(found, description, draft)


def _continued(path: Path, description: Description, draft: SweepDraft) -> tuple[SweepDirectory, Axes | Trials]:
    """Return a sweep with the jobs of this command line, which it gets if they are new."""
    SweepDirectory.load(path, key=_KEY)  # no lock is left in a directory without a sweep
    if not draft.follows_links:
        check_links(path, key=_KEY)
    with RunLock(path, key=_KEY, patience=_PATIENCE):
        directory = SweepDirectory.load(path, key=_KEY)
        old, new = directory.description, _same_jobs(directory.description, description, draft)
        is_new = new.axes.count > old.axes.count if isinstance(new.axes, Axes) else new.axes.masked() != old.axes
        if is_new or (new.average, new.configs) != (old.average, old.configs):
            directory.widen(new)
    return directory, new.axes


def _same_jobs(old: Description, new: Description, draft: SweepDraft) -> Description:
    """Return the description of a sweep with the jobs that this command line adds.

    Raises:
        UserError: the command line has another config, or not all jobs of the sweep.
    """
    axes = _widened(draft.axes, old.axes)
    if isinstance(axes, Trials) and axes.log is not None and draft.search is not None:
        draft.search.check_same(axes.log)
    now = draft.configs(axes)
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
    return replace(new, axes=axes, configs=now)


def _widened(new: Axes | Trials, old: Axes | Trials) -> Axes | Trials:
    """Return the jobs of a sweep with those that this command line adds."""
    if isinstance(new, Axes) and isinstance(old, Axes):
        return new.widened(old)
    if isinstance(new, Trials) and isinstance(old, Trials):
        return new.widened(old)
    kinds = ("a grid", "without sweep.trials") if isinstance(old, Axes) else ("a search", "with sweep.trials=50")
    raise UserError(f"the sweep is {kinds[0]}", key=_KEY, remedy=f"Continue it {kinds[1]}, or leave {_KEY} out.")


def _newest(new: Description, draft: SweepDraft) -> Path:
    """Return the newest sweep with the config of this command line, and no other jobs."""
    for directory in sorted(_all(), key=lambda found: found.description.created, reverse=True):
        with suppress(UserError):
            _same_jobs(directory.description, new, draft)
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
