"""What a search is told of a job: its objectives and its validations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hydraloop.errors import UserError
from hydraloop.run_files.record_log import FILENAME, Position, Reader, read_all
from hydraloop.run_files.result import Result, by_keys
from hydraloop.sweeps.search.settings import Rule, Settings
from hydraloop.sweeps.states import JobState

TrialState = Literal["running", "paused", "complete", "failed", "pruned"]
"""`running`: asked for, and not over. `failed`: an error, NaN, or out of memory."""
_STATES: dict[str, TrialState] = {
    "finished": "complete",
    "stopped": "complete",
    "paused": "paused",
    "pruned": "pruned",
    "failed": "failed",
}

_BATCH = 1000
"""Records that are read at once."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a search is told of a job."""

    state: TrialState
    values: tuple[float, ...] | None = None
    metrics: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()


def measure(state: JobState, run_dir: Path, settings: Settings) -> Told:
    """Return what a job has reached.

    Raises:
        UserError: no record has an objective.
    """
    told = _STATES.get(state.state, "running")
    if told in ("running", "failed"):
        return Told(told)
    if state.value is None or not math.isfinite(state.value) or state.metric is None:
        return Told(told if told in ("paused", "pruned") else "failed")
    if not settings.objectives:
        return Told(told, (state.value,), (state.metric,), (_rule(state),))
    found = _measured(state, run_dir)
    for name in settings.objectives:
        if name not in found:
            remedy = f"Use one of these: {', '.join(sorted(found))}."
            raise UserError(f"no record of job {state.number} has {name}", key="sweep.objectives", remedy=remedy)
    values = tuple(found[name] for name in settings.objectives)
    if not all(map(math.isfinite, values)):
        return Told("failed")
    return Told(told, values, tuple(settings.objectives), tuple(settings.objectives.values()))


def _rule(state: JobState) -> Rule:
    """Return which values of the objective are better; by its name, if the run does not say."""
    return state.rule or ("greater" if by_keys(state.metric or "") else "less")


def _measured(state: JobState, run_dir: Path) -> dict[str, float]:
    """Return the metrics of the last validation and test, the objective, the time [s] and the memory [MiB]."""
    result = Result.read(run_dir)
    found = {} if result is None else {**result.test_metrics, **result.val_metrics}
    records = [record.values["memory"] for record in read_all(run_dir / FILENAME) if "memory" in record.values]
    found |= {"memory": max(records)} if records else {}
    assert state.metric is not None
    assert state.value is not None
    return {**found, state.metric: state.value, "time": state.seconds}


class Validations:
    """Reads the values of a metric in the validations of a run, also while it writes them.

    Args:
        run_dir: of the run.
        metric: whose values are read.
    """

    def __init__(self, run_dir: Path, metric: str) -> None:
        self._reader, self._metric, self._count = Reader(run_dir / FILENAME, Position()), metric, 0

    def read(self) -> Iterator[tuple[int, float]]:
        """Yield the number, from 1, and the value of each new validation."""
        while True:
            records, self._reader.position = self._reader.read(_BATCH)
            for record in records:
                if record.mode == "val" and self._metric in record.values:
                    self._count += 1
                    yield self._count, record.values[self._metric]
            if len(records) < _BATCH:
                return
