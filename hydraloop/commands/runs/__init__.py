"""`python -m hydraloop runs`: lists all runs and jobs of a project, deletes runs, and prunes checkpoints.

It reads the files of each run. There is no database, so nothing can disagree with the files.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydraloop import json_answers
from hydraloop.commands.runs import cleanup
from hydraloop.commands.runs.found import Run, find
from hydraloop.commands.runs.selection import EXAMPLE, ordered, selected
from hydraloop.engine.report.formats import brief, duration, in_bytes, number
from hydraloop.errors import UserError, printable
from hydraloop.run_files.environment import shown

_HEADERS = ("run", "status", "experiment", "best", "time", "size", "tags", "typed")


def run(args: argparse.Namespace) -> int:
    """Print a table or JSON, and delete what is selected. Returns the exit code: 1 if something was left, else 0.

    Raises:
        UserError: a mistake in the arguments, or something is to be deleted and nobody can be asked.
    """
    folders, condition = _arguments(args.given)
    if args.remove is not None and condition is None and not args.all:
        remedy = f"Add a condition, or --all: {EXAMPLE} --{args.remove}"
        raise UserError("no condition says which runs", key=f"--{args.remove}", remedy=remedy)
    rows = [row for folder in folders for row in find(folder)]
    rows = rows if condition is None else selected(rows, condition)
    rows = rows if args.sort is None else ordered(rows, args.sort, reverse=args.reverse)
    if not args.json or args.remove is not None:  # with --json, to standard error
        _print_table(rows)
    done = None if args.remove is None else cleanup.clean(rows, args.remove, is_sure=args.yes)
    if args.json:
        cleaned = {} if done is None else asdict(done)
        json_answers.write("runs", {"runs": [_plain(row) for row in rows], **cleaned})
    return int(done is not None and bool(done.left))


def _arguments(given: Sequence[str]) -> tuple[list[Path], str | None]:
    """Return the folders to look in, and the condition; None without one. An argument that is a folder is the folder.

    Raises:
        UserError: there are two folders, or two conditions.
    """
    folders = [Path(one) for one in given if Path(one).is_dir()]
    conditions = [one for one in given if not Path(one).is_dir()]
    if len(folders) > 1 or len(conditions) > 1:
        what = "folders" if len(folders) > 1 else "conditions, or a folder that does not exist"
        raise UserError(f"there are two {what}", key="runs", remedy=f"Quote a condition: {EXAMPLE}")
    return folders or [folder for folder in cleanup.ROOTS if folder.is_dir()], next(iter(conditions), None)


def _print_table(rows: Sequence[Run]) -> None:
    """Print a line for each run. In a terminal, a long line is cut."""
    lines = [_HEADERS, *(tuple(printable(cell).replace("\n", " ") for cell in _cells(row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for cells in lines if rows else []:
        text = "  ".join(f"{cell:{size}}" for cell, size in zip(cells, widths, strict=True))
        print(text.rstrip()[:width])
    total = sum(row.size for row in rows)
    print(f"{len(rows):,} run{'' if len(rows) == 1 else 's'}, {in_bytes(total)}")


def _cells(row: Run) -> tuple[str, ...]:
    goal = row.result.objective
    best = "" if goal is None else f"{goal.metric} {number(goal.value)}"
    time = duration(row.result.seconds) if row.result.seconds else ""
    typed, tags = brief(" ".join(row.typed)), ", ".join(row.tags)
    return shown(row.path), row.status, row.experiment, best, time, in_bytes(row.size), tags, typed


def _plain(row: Run) -> dict[str, Any]:
    names = ("run", "job", "status", "experiment", "typed", "hooks", "tags", "size", "seconds", "days")
    found = {name: row.value(name) for name in names}
    goal = row.result.objective
    outcome = ("val_metrics", "test_metrics", "progress", "error")
    written = {name: getattr(row.result, name) for name in outcome}
    return {**found, "objective": None if goal is None else asdict(goal), **written}
