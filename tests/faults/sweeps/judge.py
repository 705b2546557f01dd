"""What the suites count of a sweep: from its ledger, answers and files, MLflow, and a sweep that was not killed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.e2e.projects import Run
from tests.e2e.trackers.tracked import mlflow_runs, points
from tests.faults.comparison import compared, result
from tests.faults.sweeps.harness import Event, Sweep

_OVER = ("finished", "pruned")
_OF_A_SWEEP = ("directory", "command", "hours", "seconds")
"""What differs in the results of two sweeps."""
_CACHE = "torchinductor_"
"""A folder that torch makes and keeps."""
_TEXTS_OF_MLFLOW = ("config", "result.json")
"""Beginnings of the files that MLflow writes into a folder `tmp…` to store them. A killed sender leaves the folder."""


def problems(sweep: Sweep, quiet: Sweep) -> Iterator[tuple[str, str]]:
    """Yield what is wrong: `lost`, `doubled`, `different` or `left`, and a description."""
    jobs = sweep.answer("status")["jobs"]
    yield from problems_of_jobs(jobs, sweep.events())
    yield from (("different", text) for text in compared("results", _table(sweep), _table(quiet)))
    runs = {job["number"]: Run(sweep.path / job["directory"]) for job in jobs}
    for job in quiet.answer("status")["jobs"]:
        other, mine = Run(quiet.path / job["directory"]), runs.get(job["number"])
        if mine is None or not (mine.path / "result.json").exists():
            yield "lost", f"job {job['number']} has no result"
            continue
        yield from (("different", text) for text in compared(f"job {job['number']}", result(mine), result(other)))
        if keys(mine) != keys(other):
            yield "different", f"job {job['number']}: records {keys(mine)}, not {keys(other)}"
    yield from _problems_in_mlflow(sweep, runs)
    yield from (("different", text) for text in compared("MLflow", _ends(sweep), _ends(quiet)))
    left = [path for path in sweep.temporary.iterdir() if not _is_of_a_library(path)]
    left += sweep.path.rglob("*.part")
    yield from (("left", str(path.relative_to(sweep.project.path))) for path in left)


def _is_of_a_library(path: Path) -> bool:
    is_of_mlflow = path.name.startswith("tmp") and path.is_dir()
    is_of_mlflow = is_of_mlflow and all(file.name.startswith(_TEXTS_OF_MLFLOW) for file in path.iterdir())
    return is_of_mlflow or path.name.startswith(_CACHE)


def problems_of_jobs(jobs: list[dict[str, Any]], events: list[Event]) -> Iterator[tuple[str, str]]:
    """Yield the jobs that are not over, and how the ledger shows that one has run twice at a time, or after its end.

    Args:
        jobs: of `status`.
    """
    for number, state in ((job["number"], job["state"]) for job in jobs):
        mine = [(pid, event) for job, pid, event in events if job == number]
        names = [event for _, event in mine]
        attempts = Counter(pid for pid, _ in groupby(mine, key=lambda one: one[0]))
        if state not in _OVER or (state == "finished" and "trained" not in names):
            yield "lost", f"job {number}: it is {state}, after {names[-3:]}"
        if twice := [pid for pid, count in attempts.items() if count > 1]:
            yield "doubled", f"job {number}: processes {twice} have trained while another one did"
        if "done" in names[:-1]:
            yield "doubled", f"job {number}: it has continued after its end: {names[names.index('done') :]}"


def _problems_in_mlflow(sweep: Sweep, runs: dict[int, Run]) -> Iterator[tuple[str, str]]:
    """Yield which jobs have not one run in MLflow, and which values are not there once.

    Not compared are the times of iterations, which differ when a job repeats them, and `best/…`, sent at each end.
    """
    found = mlflow_runs(sweep.store)
    parents = [one for one in found if one.parent is None]
    jobs = Counter(int(one.tags.get("job", -1)) for one in found if one.parent is not None)
    if len(parents) != 1 or jobs != Counter(runs.keys()):
        yield "different", f"MLflow has {len(parents)} parents, and jobs {dict(jobs)}"
    for one in (one for one in found if int(one.tags.get("job", -1)) in runs):
        for name, values in points(runs[int(one.tags["job"])]).items():
            there = one.points.get(name, [])
            if name.startswith("perf/"):
                there, values = [(step, 0.0) for step in {*dict(there)}], [(step, 0.0) for step, _ in values]
            steps = Counter(step for step, _ in there)
            yield from (("doubled", f"MLflow: {one.name}: {name} at {step}") for step in steps if steps[step] > 1)
            if set(there) != set(values):
                yield "lost", f"MLflow: {one.name}: {name} is {there}, not {values}"


def _ends(sweep: Sweep) -> dict[str, str]:
    """Return how the runs in MLflow have ended, by job."""
    return {f"job {one.tags.get('job', 'of the parent')}": one.status for one in mlflow_runs(sweep.store)}


def _table(sweep: Sweep) -> Any:
    answer = _without(sweep.answer("results"))
    return {**answer, "rows": sorted(answer["rows"], key=lambda row: int(row["job"]))}


def _without(value: Any) -> Any:
    """Return results without what differs in two sweeps."""
    if isinstance(value, dict):
        return {name: _without(one) for name, one in value.items() if name not in _OF_A_SWEEP}
    return [_without(one) for one in value] if isinstance(value, list) else value


def keys(run: Run) -> list[tuple[str, int]]:
    """Return which records a run has."""
    return [(record["mode"], record["iteration"]) for record in run.records]
