"""What the suite counts of a sweep, from its ledger, its results and a sweep that was not interrupted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import groupby

from hydraloop.sweeps.sweep_directory import SweepDirectory
from tests.e2e.projects import Run
from tests.e2e.trackers.tracked import mlflow_runs, points
from tests.faults.comparison import result
from tests.faults.sweeps.harness import Sweep


def problems(sweep: Sweep, whole: Sweep) -> Iterator[tuple[str, str]]:
    """Yield what is wrong: `lost`, `doubled` or `different`, and a description."""
    events = sweep.events()
    directory, other_directory = SweepDirectory.load(sweep.path), SweepDirectory.load(whole.path)
    found = directory.states()
    for state in found:
        mine = [(pid, event) for job, pid, event in events if job == state.number]
        yield from ((kind, f"job {state.number}: {text}") for kind, text in _doubled(mine))
        run = Run(directory.run_dir(state))
        other = Run(other_directory.run_dir(other_directory.state(state.number)))
        if state.state != "finished" or not (run.path / "result.json").exists():
            yield "lost", f"job {state.number}: it is {state.state}"
        elif result(run) != result(other) or state.value != result(other)["best"]["value"]:
            yield "different", f"job {state.number}: {result(run)}, not {result(other)}"
        elif keys(run) != keys(other):
            yield "different", f"job {state.number}: records {keys(run)}, not {keys(other)}"


def problems_of_search(sweep: Sweep) -> Iterator[tuple[str, str]]:
    """Yield what is wrong, as `problems`. With several slots, a search asks for other trials after kills: none is
    compared.
    """
    directory = SweepDirectory.load(sweep.path)
    for state in directory.states():
        mine = [(pid, event) for job, pid, event in sweep.events() if job == state.number]
        found = [(kind, text) for kind, text in _doubled(mine) if state.state == "finished" or kind != "lost"]
        yield from ((kind, f"job {state.number}: {text}") for kind, text in found)
        result = Run(directory.run_dir(state)).result if state.attempts else {}
        if state.state not in ("finished", "pruned") or (state.state == "finished") != (result["status"] == "finished"):
            yield "lost", f"job {state.number}: it is {state.state}, its result {result.get('status')}"
    search = directory.description.jobs.search
    assert search is not None, "it is a search"
    if directory.count != search.trials * search.repeats:
        yield "lost", f"asks: {directory.count}"


def problems_in_mlflow(sweep: Sweep) -> Iterator[tuple[str, str]]:
    """Yield what is wrong in MLflow, as `problems`: a job has not one run, or a value is not there once.

    Not compared are the times of iterations, which differ when a job repeats them, and `best/…`, sent at each end.
    """
    sweep.project.python("-m", "hydraloop", "sync", sweep.path.name)  # what a dead process had not sent yet
    directory = SweepDirectory.load(sweep.path)
    found = {one.uid: one for one in mlflow_runs(sweep.project.path)}
    runs = [Run(directory.run_dir(state)) for state in directory.states() if state.attempts]
    cursors = [json.loads((run.path / "tracking" / "mlflow.cursor.json").read_text()) for run in runs]
    mine = [found[cursor["memory"]["run_id"]] for cursor in cursors]
    parents = {one.parent for one in mine}
    if len(parents) != 1 or sorted(one.uid for one in mine) != sorted(
        uid for uid, one in found.items() if one.parent in parents
    ):
        yield "different", f"{len(mine)} jobs have other runs in MLflow"
    for sent, run in zip(mine, runs, strict=True):
        for name, values in points(run).items():
            if name.startswith("perf/"):
                continue
            there = sent.points.get(name, [])
            yield from (("lost", f"{sent.name}: {name} of {value}") for value in values if value not in there)
            steps = Counter(step for step, _ in there)
            yield from (("doubled", f"{sent.name}: {name} at {step}") for step, count in steps.items() if count > 1)


def _doubled(events: list[tuple[int, str]]) -> Iterator[tuple[str, str]]:
    """Yield how the events of a job show that it has run twice at a time, or again after its end."""
    attempts = [pid for pid, _ in groupby(events, key=lambda one: one[0])]
    twice = [pid for pid, count in Counter(attempts).items() if count > 1]
    if twice:
        yield "doubled", f"processes {twice} have trained while another one did"
    names = [event for _, event in events]
    if "trained" not in names:
        yield "lost", "it has not trained to its end"
    if "done" in names[:-1]:
        yield "doubled", f"it has continued after its end: {names[names.index('done') :]}"


def keys(run: Run) -> list[tuple[str, int]]:
    """Return which records a run has."""
    return [(record["mode"], record["iteration"]) for record in run.records]
