"""What a search has asked for and been told: `History` is the sum of the events of its log. Imports no Optuna."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hydraloop.sweeps.search.space import Params

Rule = Literal["greater", "less"]
TrialState = Literal["running", "paused", "complete", "failed", "pruned"]
"""`running`: asked for, and not over. `failed`: an error, NaN, or out of memory."""
Event = Mapping[str, Any]
"""A line of the log. `event` is its kind, and the name of the method of `History` that takes the other entries."""


@dataclass(slots=True)
class Trial:
    """A point of the space, and what is known of it."""

    number: int
    params: Params
    given: Params | None = None
    """What was enqueued. None: all values are the sampler's."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """What the sampler has noted."""
    state: TrialState = "running"
    results: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """The objectives of each job that has ended, by its number in the trial."""
    curve: dict[int, float] = field(default_factory=dict)
    """The monitored metric by validation, from 1; with `sweep.promote`, by rung."""
    rung: int = 0
    """Up to which rung the trial may run, with `sweep.promote`."""

    @property
    def values(self) -> tuple[float, ...] | None:
        """The objectives: the mean over the jobs; None if there is none."""
        if not self.results:
            return None
        return tuple(sum(column) / len(self.results) for column in zip(*self.results.values(), strict=True))


@dataclass
class History:
    """A search up to an event. The same events give the same history, so that each decision can be made again."""

    repeats: int = 1
    """The jobs of a trial."""
    trials: list[Trial] = field(default_factory=list)
    """By number."""
    metrics: tuple[str, ...] = ()
    """The objectives. Empty until the first result."""
    rules: tuple[Rule, ...] = ()
    """Which values of each objective are better."""
    promoted: list[set[int]] = field(default_factory=list)
    """The trials that were promoted out of each rung."""
    rungs: list[dict[int, float]] = field(default_factory=list)
    """The values of all trials that have reached each rung."""
    is_ended: bool = False
    """Whether no further trial is asked for."""
    told: set[int] = field(default_factory=set)
    """The jobs whose end is known."""

    def apply(self, event: Event) -> None:
        """Add an event.

        Raises:
            TypeError, KeyError, AttributeError: it is of an unknown kind, or incomplete.
        """
        entries = dict(event)
        getattr(self, f"_on_{entries.pop('event')}")(**entries)

    def _on_begin(self, **_: Any) -> None:
        """The space and the options, at the start and whenever they change."""
        self.is_ended = False

    def _on_end(self) -> None:
        """`sweep.until` holds."""
        self.is_ended = True

    def _on_ask(self, trial: int, params: Params, attributes: Mapping[str, Any], given: Params | None = None) -> None:
        assert trial == len(self.trials), "trials are numbered"
        self.trials.append(Trial(trial, params, given, attributes))

    def _on_curve(self, trial: int, validation: int, value: float | str) -> None:
        self.trials[trial].curve[validation] = float(value)

    def _on_told(
        self,
        job: int,
        state: TrialState,
        values: list[float] | None = None,
        metrics: list[str] | None = None,
        rules: list[Rule] | None = None,
    ) -> None:
        trial, repeat = self.of(job)
        self.told.add(job)
        is_late = trial.state == "complete" or (trial.state in ("pruned", "failed") and state != "complete")
        if is_late:
            return
        if values is not None and rules is not None and metrics is not None:
            self.rules, self.metrics = tuple(rules), tuple(metrics)
            if state == "complete":
                trial.results[repeat] = tuple(values)
        if state != "complete":
            trial.state = state
        elif len(trial.results) == self.repeats:
            trial.state = "complete"

    def _on_rung(
        self, trial: int, rung: int, value: float | str, metrics: Sequence[str] = (), rules: Sequence[Rule] = ()
    ) -> None:
        self.metrics, self.rules = tuple(metrics) or self.metrics, tuple(rules) or self.rules
        while len(self.rungs) <= rung:
            self.rungs.append({})
            self.promoted.append(set())
        self.rungs[rung][trial] = self.trials[trial].curve[rung + 1] = float(value)
        self.trials[trial].state = "paused"

    def _on_promote(self, trial: int, rung: int, left: int) -> None:
        """A trial continues from a rung. `left` are the trials that could still be asked for."""
        self.promoted[rung].add(trial)
        self.trials[trial].rung, self.trials[trial].state = rung + 1, "running"

    def _on_prune(self, trial: int, left: int | None = None) -> None:
        """A trial is to end. `left` are the trials that could still be asked for."""
        self.trials[trial].state = "pruned"

    def of(self, job: int) -> tuple[Trial, int]:
        """Return the trial of a job, and the number of the job in it."""
        return self.trials[job // self.repeats], job % self.repeats

    def job(self, trial: Trial, repeat: int = 0) -> int:
        """Return the number of a job of a trial."""
        return trial.number * self.repeats + repeat

    def best(self) -> Trial | None:
        """Return the best trial that is complete, with one objective; None if there is none."""
        if len(self.rules) != 1:
            return None
        found = [one for one in self.trials if one.state == "complete"]
        return min(found, key=lambda one: (rank(one.values, self.rules), one.number), default=None)


def rank(values: tuple[float, ...] | None, rules: tuple[Rule, ...]) -> float:
    """Return the first objective for sorting, the best first; infinity for NaN and for none."""
    if values is None or not math.isfinite(values[0]):
        return math.inf
    return -values[0] if rules[0] == "greater" else values[0]
