"""`hydraloop runs`: lists all runs and jobs of a project, from their files. Imports no torch.

There is no database, so nothing can disagree with the files. A thousand runs take half a second of a processor.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from hydraloop.errors import UserError, missing_path, printable, suggestion
from hydraloop.files import lock
from hydraloop.files.environment import shown
from hydraloop.files.metrics_log import FILENAME as LOG
from hydraloop.files.metrics_log import read_end
from hydraloop.files.result import FILENAME as RESULT
from hydraloop.files.result import PAUSE, Objective, Result, by_keys
from hydraloop.files.run_directory import OUTPUTS, RECORDS, config_file, typed_overrides
from hydraloop.files.secrets import mask_overrides
from hydraloop.files.terminal import brief, duration, number, print_json
from hydraloop.sweeps import sweep_directory
from hydraloop.sweeps.executors.slurm_queue import current_states
from hydraloop.sweeps.job_states import JobState
from hydraloop.sweeps.sweep_directory import SweepDirectory

_ROOTS = (OUTPUTS, Path("multirun"))
"""Where the runs of a project are."""
_TAIL = 1 << 16
"""Bytes of a record log in which the last validation is looked for: about 300 records."""


@dataclass(frozen=True, slots=True)
class _Run:
    """A run, or a job of a sweep."""

    path: Path
    status: str
    """A `states.State`; `unknown` for the run of another program, or if its files cannot be read."""
    typed: list[str]
    """Overrides as typed, secrets masked."""
    result: Result
    """Without the file, only the last validation."""
    started: float
    """When it was started, or resumed for the last time, in seconds since 1970."""
    experiment: str
    """The option `experiment_name`; empty if it is not known."""

    @property
    def metrics(self) -> dict[str, float]:
        """The newest values of a validation, the best one of the metric by which runs are compared, and of the test."""
        goal, result = self.result.objective, self.result
        best = {} if goal is None else {goal.metric: goal.value}
        return {**result.val_metrics, **best, **{f"test.{name}": value for name, value in result.test_metrics.items()}}

    def metric(self, name: str) -> float | None:
        """Return the value of a metric; None if it is missing, not a number or NaN."""
        value = self.metrics.get(name)
        return value if isinstance(value, int | float) and value == value else None


def run(args: argparse.Namespace) -> int:
    """Print a table or JSON. Returns the exit code 0.

    Raises:
        UserError: there is no such folder, or no run has the metric of `--sort`.
    """
    folder: Path | None = args.directory
    if folder is not None and not folder.is_dir():
        remedy = missing_path(folder, "Name one: ls -d outputs multirun")
        raise UserError(f"there is no folder {folder}", key="runs", remedy=remedy)
    folders = [one for one in _ROOTS if one.is_dir()] if folder is None else [folder]
    rows = sorted((row for one in folders for row in _runs_in(one)), key=lambda row: row.started, reverse=True)
    rows = rows if args.sort is None else _ordered(rows, args.sort)
    if args.json:
        print_json({"runs": [_plain(row) for row in rows]})
    else:
        _print_table(rows, args.sort)
    return 0


def _ordered(rows: Sequence[_Run], name: str) -> list[_Run]:
    """Return the runs by a metric, the best first; those without it come last."""
    with_metric = [row for row in rows if row.metric(name) is not None]
    if rows and not with_metric:
        known = {metric for row in rows for metric in row.metrics}
        raise UserError(f"no run has the metric {name}", key="--sort", remedy=suggestion(name, known))
    metric = name.removeprefix("test.")
    goals = [row.result.objective for row in rows if row.result.objective is not None]
    rules = {goal.rule for goal in goals if goal.metric == metric} - {None}
    greater = "greater" in rules if rules else bool(by_keys(metric))
    with_metric.sort(key=lambda row: row.metric(name) or 0.0, reverse=greater)
    return with_metric + [row for row in rows if row.metric(name) is None]


def _print_table(rows: Sequence[_Run], metric: str | None) -> None:
    """Print a line for each run, with its best value or the metric of `--sort`. In a terminal, a long line is cut."""
    headers = ("run", "status", "experiment", metric or "best", "time", "typed")
    lines = [headers, *(tuple(printable(cell).replace("\n", " ") for cell in _cells(row, metric)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for cells in lines if rows else []:
        text = "  ".join(f"{cell:{size}}" for cell, size in zip(cells, widths, strict=True))
        print(text.rstrip()[:width])
    print(f"{len(rows):,} run{'' if len(rows) == 1 else 's'}")


def _cells(row: _Run, metric: str | None) -> tuple[str, ...]:
    goal = row.result.objective
    shown_value = "" if goal is None else f"{goal.metric} {number(goal.value)}{row.result.note}"
    if metric is not None:
        value = row.metric(metric)
        shown_value = "" if value is None else number(value)
    time = duration(row.result.seconds) if row.result.seconds else ""
    return shown(row.path), row.status, row.experiment, shown_value, time, brief(" ".join(row.typed))


def result_from_records(run_dir: Path) -> Result:
    """Return what the records say of a run that has written no result: its last validation, with the first metric."""
    with suppress(OSError):
        for record in reversed(read_end(run_dir / LOG, _TAIL)):
            if record.mode == "val" and record.values:
                metric, value = next(iter(record.values.items()))
                goal = Objective(metric, None, value, record.iteration)
                return Result("interrupted", val_metrics=record.values, objective=goal)
    return Result("interrupted")


def described(path: Path) -> dict[str, Any]:
    """Return what `runs --json` says of a run."""
    return _plain(_read(path))


def _plain(row: _Run) -> dict[str, Any]:
    result = row.result
    return {
        "run": shown(row.path),
        "status": row.status,
        "experiment": row.experiment,
        "typed": row.typed,
        "started": datetime.fromtimestamp(row.started).astimezone().isoformat(timespec="seconds"),
        "seconds": result.seconds or None,  # None: killed
        "objective": None if result.objective is None else asdict(result.objective),
        **{name: getattr(result, name) for name in ("val_metrics", "test_metrics", "progress", "error")},
    }


def _runs_in(folder: Path) -> Iterator[_Run]:
    """Yield the runs in a folder and below it. No link in the folder is followed."""
    is_folder: dict[str, bool] = {}
    with suppress(OSError), os.scandir(folder) as entries:
        is_folder = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
    if sweep_directory.FILENAME in is_folder:
        with suppress(UserError, TypeError):  # if it is damaged, its folders are listed as any others
            states = current_states(SweepDirectory.load(folder))
            yield from [_job(folder, state) for state in states if state.state != "queued"]
            return
    if not is_folder.keys().isdisjoint((RECORDS, RESULT, LOG)):
        yield _read(folder)
        return
    for name in sorted(is_folder, key=lambda name: (len(name), name)):
        if is_folder[name] and name[0] != ".":
            yield from _runs_in(folder / name)


def _read(path: Path, typed: list[str] | None = None) -> _Run:
    result = Result.read(path)
    config = ""
    started = 0.0
    with suppress(OSError, ValueError):
        file = config_file(path)
        started = (path if file is None else file).stat().st_mtime
        config = "" if file is None else file.read_text(encoding="utf-8")
    experiment = re.search(r"^experiment_name: (.*)", config, re.MULTILINE)
    status: str = "unknown" if result is None else result.status
    if lock.holder(path) is not None:
        status = "running"
    elif result is None and experiment is not None:
        status = "interrupted"
    elif result is not None and (result.preempted_by or "").startswith(PAUSE):
        status = "paused"
    typed = typed_overrides(path) if typed is None else typed
    name = "" if experiment is None else experiment[1].strip("'\"")
    return _Run(path, status, typed, result or result_from_records(path), started, name)


def _job(sweep: Path, state: JobState) -> _Run:
    """Return a job.

    Raises:
        TypeError: another program has written its state, which could name any directory.
    """
    path = sweep / state.directory
    is_ours = isinstance(state.seconds, int | float) and isinstance(state.metric, str | None)
    if not (is_ours and isinstance(state.state, str) and path.resolve().is_relative_to(sweep.resolve())):
        raise TypeError(state)
    run = _read(path, mask_overrides(state.overrides))
    goal = run.result.objective
    if state.metric is not None and state.value is not None:
        goal = Objective(state.metric, state.rule, state.value, state.step or 0)
    result = replace(run.result, error=state.error, objective=goal, seconds=state.seconds)
    return replace(run, status=state.state, result=result)
