"""Deletes runs, and their checkpoints. Nothing outside of `outputs/` and `multirun/` changes, and no running run."""

from __future__ import annotations

import secrets
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hydraloop.commands.runs.found import Run, files_in
from hydraloop.engine.report.formats import in_bytes
from hydraloop.errors import UserError, printable
from hydraloop.run_files import lock
from hydraloop.run_files.checkpoint_files import BEST, candidates, first_intact, remove
from hydraloop.run_files.environment import shown
from hydraloop.run_files.lock import RunLock
from hydraloop.run_files.result import Result
from hydraloop.run_files.run_directory import OUTPUTS, checkpoint_folders
from hydraloop.sweeps import sweep_description
from hydraloop.tracking.cursor import is_followed

ROOTS = (OUTPUTS, Path("multirun"))
"""Where the runs of a project are. Only what is inside changes."""
_TRASH = ".hydraloop-trash-"
"""Begins the name of a folder in `outputs/` that is being deleted."""


@dataclass(slots=True)
class Outcome:
    """What was done."""

    freed: int = 0
    """Bytes."""
    left: dict[str, str] = field(default_factory=dict)
    """Why a selected run was left as it is, by its directory."""


def clean(rows: Sequence[Run], how: str, *, is_sure: bool) -> Outcome:
    """Delete runs (`delete`), or their checkpoints except for the last and the best (`prune-checkpoints`).

    Args:
        is_sure: do not ask.

    Raises:
        UserError: somebody has to be asked, and cannot be.
    """
    why_not, change = (_undeletable, _delete) if how == "delete" else (_unprunable, _prune)
    found = {shown(row.path): why_not(row) for row in rows}
    outcome = Outcome(left={path: why for path, why in found.items() if why is not None})
    ready = [row for row in rows if shown(row.path) not in outcome.left]
    for path, why in outcome.left.items():
        print(printable(f"left as it is: {path}: {why}"))
    if not ready or not (is_sure or _agreed(ready, how)):
        return outcome
    for row in ready:
        try:
            if files_in(row.path)[0] != row.size:
                raise UserError("it has changed since it was listed")
            change(row.path)
            outcome.freed += row.size - files_in(row.path)[0]
        except (OSError, UserError) as error:
            why = error.problem if isinstance(error, UserError) else f"{error.filename}: {error.strerror}"
            outcome.left[shown(row.path)] = why
            print(printable(f"error: {shown(row.path)}: {why}"), file=sys.stderr)
    print(f"{in_bytes(outcome.freed)} freed")
    return outcome


def _agreed(rows: Sequence[Run], how: str) -> bool:
    if not sys.stdin.isatty():
        problem = f"it asks before it changes {_count(rows)}, and nobody can answer"
        raise UserError(problem, key=f"--{how}", remedy="Read the list, then add --yes.")
    what = "Delete" if how == "delete" else "Delete checkpoints, except for the last and the best, of"
    answer = input(f"{what} {_count(rows)}? [y/N] ")
    return answer.strip().lower() in ("y", "yes")


def _count(rows: Sequence[Run]) -> str:
    return f"{len(rows):,} run{'' if len(rows) == 1 else 's'}, {in_bytes(sum(row.size for row in rows))}"


def _undeletable(row: Run) -> str | None:
    """Return why a run is not deleted; None if it can be."""
    if row.is_job:
        return "it is a job of a sweep"
    if row.has_others:
        return "another run is in a folder of it"
    return _untouchable(row, ROOTS[:1])


def _unprunable(row: Run) -> str | None:
    sweeps = [folder for folder in row.path.parents if (folder / sweep_description.FILENAME).exists()]
    if any(map(lock.holder, sweeps)):  # it may continue the job
        return "its sweep is running"
    return _untouchable(row, ROOTS)


def _untouchable(row: Run, roots: Sequence[Path]) -> str | None:
    real = row.path.resolve()
    if row.path.is_symlink():
        return "it is a link"
    if not any(root.resolve() in real.parents for root in roots):
        return f"it is outside of {' and '.join(f'{root}/' for root in roots)}"
    if lock.holder(real) is not None:
        return "it is running"
    return "its records are being sent" if is_followed(real) else None


def _delete(path: Path) -> None:
    """Delete a run. It is renamed first, so that no other process finds half a run."""
    outputs, real = OUTPUTS.resolve(), path.resolve()
    trash = outputs / f"{_TRASH}{secrets.token_hex(4)}"
    with RunLock(real, key="runs"):
        real.rename(trash)
    for folder in outputs.glob(f"{_TRASH}*"):  # one may be left of a process that was killed
        with suppress(FileNotFoundError):  # another process deletes it, too
            shutil.rmtree(folder, ignore_errors=folder != trash)


def _prune(path: Path) -> None:
    """Delete the checkpoints of a run that it does not continue from, except for the best ones.

    Damaged ones that are newer than the one to continue from are kept: somebody may want to know.
    """
    result = Result.read(path)
    best = None if result is None or result.best is None else Path(result.best.checkpoint).name
    with RunLock(path, key="runs"):
        files = candidates(*checkpoint_folders(path))
        last = first_intact(files)
        for file in files[files.index(last) + 1 :] if last is not None else ():
            is_inside = file.resolve().is_relative_to(path.resolve()) and not file.is_symlink()
            if is_inside and file.name != best and not file.name.startswith(BEST):
                remove(file)
