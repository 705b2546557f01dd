"""Source: decides which job of a sweep the controller starts next, and which jobs end early.

`Grid` knows all jobs from the beginning. In `SearchSource`, Optuna's sampler chooses the values of a new trial. ASHA
chooses the paused trial that continues (Li et al., A System for Massively Parallel Hyperparameter Tuning, 2020,
Algorithm 2).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from hydraloop.files.result import PAUSE
from hydraloop.files.secrets import mask_overrides
from hydraloop.sweeps import search_sampler
from hydraloop.sweeps.job_states import JobState
from hydraloop.sweeps.search import Rule, Search
from hydraloop.sweeps.search_history import History, HistoryReader, Trial, Validations
from hydraloop.sweeps.sweep_directory import SweepDirectory


@dataclass(frozen=True, slots=True)
class Job:
    """A job that is to be started."""

    number: int
    lines: tuple[str, ...]
    """The overrides of the job, not masked."""


class Source(Protocol):
    """Returns each job that is not over once, and a paused job each time that it is promoted."""

    @property
    def numbers(self) -> Sequence[int]:
        """The jobs that are to be over at the end."""

    def next_job(self) -> Job | None:
        """Return the next job; None if all were returned, or if a running job must end first."""

    def job_ended(self, state: JobState) -> None:
        """Called when a job has ended and is not retried. At the start, called for the jobs of earlier controllers."""

    def jobs_to_prune(self, running: Iterable[JobState]) -> Mapping[int, str]:
        """Return the numbers of the jobs that are to end early, and the reasons. Called several times a second.

        Args:
            running: the jobs that the controller runs.
        """


class Grid(Source):
    """Returns the jobs of a grid in the order of their numbers.

    Args:
        jobs: the overrides of the jobs that the command line names, not masked, by number.
    """

    def __init__(self, jobs: Mapping[int, tuple[str, ...]]) -> None:
        self._jobs = dict(sorted(jobs.items()))
        self._numbers = tuple(self._jobs)

    @property
    def numbers(self) -> Sequence[int]:
        """The jobs that the command line names."""
        return self._numbers

    def next_job(self) -> Job | None:
        """Return the next job that is not over."""
        if not self._jobs:
            return None
        number = next(iter(self._jobs))
        return Job(number, self._jobs.pop(number))

    def job_ended(self, state: JobState) -> None:
        """Remove a job that is over, or that was interrupted and is not retried."""
        if state.is_over or state.state == "interrupted":
            self._jobs.pop(state.number, None)

    def jobs_to_prune(self, running: Iterable[JobState]) -> Mapping[int, str]:
        """Return no job."""
        return {}


_FIXED = "fixed_params"
"""Key in the notes of an enqueued trial. The name is Optuna's."""


class SearchSource(Source):
    """Returns the jobs of a search: those of trials that have begun, then promoted ones, then those of new trials.

    Every decision follows from the history, which is read from files. So a killed search decides as if it had not been
    killed.

    Args:
        directory: the directory of the sweep.
        search: the search, not masked.
        enqueue: `sweep.enqueue`, the trials that are run first.

    Raises:
        UserError: an enqueued trial is outside the space, or the sampler is not trusted.
    """

    def __init__(self, directory: SweepDirectory, search: Search, enqueue: Iterable[Any]) -> None:
        self._directory = directory
        self._search = search
        self._enqueued = search_sampler.check(search, enqueue)
        self._started = set[int]()
        """Jobs that the controller runs or retries."""
        self._not_retried = set[int]()
        """Interrupted jobs that this controller does not restart."""
        self._validations: dict[tuple[int, int], Validations] = {}
        """The validations of running jobs, by the number of the job and of the attempt."""
        self._prune_reasons: dict[int, str] = {}
        """Why jobs are to end early, by their numbers."""
        self._reader = HistoryReader(directory, search)
        self._history = self._reader.read()
        self._is_history_old = True
        """Whether a job has ended since the history was read."""

    @property
    def numbers(self) -> Sequence[int]:
        """All jobs of the search."""
        return range(max(self._search.trials, len(self._history.trials)) * self._search.repeats)

    def job_ended(self, state: JobState) -> None:
        """Let the next decision include a job that has ended."""
        self._is_history_old = True
        self._prune_reasons.pop(state.number, None)
        self._started.discard(state.number)
        if state.state == "interrupted":
            self._not_retried.add(state.number)

    def next_job(self) -> Job | None:
        """Return a job of a trial that has begun, a promoted one, or one of a new trial. Waits for the sampler."""
        self._read_history()
        job = self._job_of_begun_trial() or self._promoted_job() or self._job_of_new_trial()
        if job is not None:
            self._started.add(job.number)
        return job

    def jobs_to_prune(self, running: Iterable[JobState]) -> Mapping[int, str]:
        """Return the jobs of failed trials, paused jobs that are never promoted, and jobs that the pruner ends."""
        jobs = list(running)
        if self._is_history_old:
            self._read_history()
        may_be_promoted = bool(jobs) or not self._can_only_promote or self._next_promoted() is not None
        for trial in self._history.trials:
            if trial.state == "failed":
                self._prune_trial(trial, "another job of the trial has failed")
            elif trial.state == "paused" and self._search.promote is not None and not may_be_promoted:
                self._prune_trial(trial, f"not promoted at rung {len(trial.curve)}")
        if self._search.prune is not None and self._history.metrics:
            for job in jobs:
                if job.number not in self._prune_reasons and (validation := self._pruned_at(job)) is not None:
                    self._prune_reasons[job.number] = f"by {self._search.prune} at validation {validation}"
        return self._prune_reasons

    def _read_history(self) -> None:
        """Read the states of all jobs.

        Raises:
            UserError: the results of the jobs cannot be compared.
        """
        self._history = self._reader.read()
        self._is_history_old = False
        if self._history.problem is not None:
            raise self._history.problem

    @property
    def _can_only_promote(self) -> bool:
        """Whether only a promotion can continue the search: all trials have begun, and none of them runs."""
        trials = self._history.trials
        return len(trials) >= self._search.trials and all(one.state != "running" for one in trials)

    # Which job is next. ----------------------------------------------------------------------------------------------

    def _job_of_begun_trial(self) -> Job | None:
        """Return a job whose trial has values: the job was not started yet, or an earlier controller was killed."""
        excluded = self._started | self._not_retried
        for trial in self._history.trials:
            if trial.state == "running":
                for state in trial.jobs:
                    if not state.is_over and state.number not in excluded:
                        return self._job(trial, state)
        return None

    def _next_promoted(self) -> Trial | None:
        if self._search.promote is None:
            return None
        return next_promoted(self._history, is_last=self._can_only_promote)

    def _promoted_job(self) -> Job | None:
        """Return a paused job that continues. It is `queued` until it runs."""
        trial = self._next_promoted()
        if trial is None:
            return None
        (paused,) = trial.jobs
        value_at_rung = trial.curve[len(trial.curve)]
        state = replace(paused, state="queued", reason=None, rungs=(*paused.rungs, value_at_rung))
        self._directory.write(state)
        return self._job(trial, state)

    def _job_of_new_trial(self) -> Job | None:
        """Let the sampler choose values, and return the first job with them; None if the search has all trials.

        The values are written before the job starts: after a kill, the trial is not chosen a second time.
        """
        history = self._history
        number = len(history.trials)
        if number >= self._search.trials:
            return None

        enqueued = sum(_FIXED in trial.notes for trial in history.trials)
        fixed = self._enqueued[enqueued] if enqueued < len(self._enqueued) else None
        params, notes = search_sampler.suggest(self._search, history, fixed)

        trial = Trial(number, params, notes)
        for repeat in range(self._search.repeats):
            lines = tuple(mask_overrides(self._search.space.lines(params, repeat)))
            state = self._directory.state(number * self._search.repeats + repeat)
            trial.jobs.append(replace(state, overrides=lines, params=params, notes=notes))
            self._directory.write(trial.jobs[-1])
        history.trials.append(trial)
        return self._job(trial, trial.jobs[0])

    def _job(self, trial: Trial, state: JobState) -> Job:
        lines = self._search.space.lines(trial.params, state.number % self._search.repeats)
        if self._search.promote is not None:
            lines = (*lines, f"{PAUSE}={self._search.rung * ETA ** len(state.rungs)}")
        return Job(state.number, lines)

    # Which jobs end early. -------------------------------------------------------------------------------------------

    def _prune_trial(self, trial: Trial, reason: str) -> None:
        self._prune_reasons.update({state.number: reason for state in trial.jobs if not state.is_over})

    def _pruned_at(self, job: JobState) -> int | None:
        """Show each new validation of a running job to the pruner, and return the one after which it ends the job."""
        attempt = (job.number, job.attempts)
        if attempt not in self._validations:
            self._validations[attempt] = Validations(self._directory.run_dir(job), self._history.metrics[0])
        validations = self._validations[attempt]
        trial = self._history.trials[job.number]
        for number, _ in validations.read():
            is_end = number == self._search.validations
            if not is_end and search_sampler.prunes(self._search, self._history, trial, validations.values):
                return number
        return None


ETA = 3
"""One of three trials of a rung continues. 3 is the default of Optuna's Hyperband."""


def promotion(
    results: Sequence[Mapping[int, float]], promoted: Sequence[Collection[int]], rule: Rule
) -> tuple[int, int] | None:
    """Return the (rung, trial) to continue next, or None if a new trial is to start.

    The best `len(results[k]) // ETA` trials of rung `k` are promoted. The highest rung is searched first, and its best
    trial is promoted first. If two values are equal, the lower number is better. A trial with NaN is not promoted.

    Args:
        results: the value of each trial that has reached a rung, by number, for each rung.
        promoted: the trials that were promoted from each rung before.
    """
    for rung in reversed(range(len(results))):
        for trial in _best(results[rung], len(results[rung]) // ETA, rule):
            if trial not in promoted[rung]:
                return rung, trial
    return None


def next_promoted(history: History, *, is_last: bool) -> Trial | None:
    """Return the paused trial that continues; None if there is none.

    Args:
        is_last: whether no other trial runs or is to start. Then the best trial of the highest rung continues if no
            trial has trained to its end.
    """
    trials = history.trials
    paused = [one for one in trials if one.state == "paused"]
    if not paused or not history.rules:
        return None
    rule = history.rules[0]

    # A trial that has reached a rung and does not wait there was promoted from it, or has ended.
    results: list[dict[int, float]] = []
    promoted: list[set[int]] = []
    for rung in range(1, 1 + max(len(one.curve) for one in trials)):
        reached = {one.number: one.curve[rung] for one in trials if len(one.curve) >= rung}
        waiting = {one.number for one in paused if len(one.curve) == rung}
        results.append(reached)
        promoted.append(set(reached) - waiting)
    promotable = promotion(results, promoted, rule)
    if promotable is not None:
        _, number = promotable
        return trials[number]

    # A search with few trials would promote none to the end: its best trial continues.
    if not is_last or any(one.state == "complete" for one in trials):
        return None
    highest = max(len(one.curve) for one in paused)
    values = {one.number: one.curve[highest] for one in paused if len(one.curve) == highest}
    return trials[next(iter(_best(values, 1, rule)), min(values))]


def _best(values: Mapping[int, float], count: int, rule: Rule) -> list[int]:
    """Return the numbers of at most `count` trials of a rung, the best one first, without trials that have NaN."""
    sign = -1 if rule == "greater" else 1
    numbers = sorted((sign * value, trial) for trial, value in values.items() if not math.isnan(value))
    return [trial for _, trial in numbers[:count]]
