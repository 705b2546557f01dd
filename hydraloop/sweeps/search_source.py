"""SearchSource: gives the jobs of a search to a controller, by a sampler and, with ASHA, by promotion at rungs."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hydraloop.files.result import PAUSE
from hydraloop.files.secrets import mask_overrides
from hydraloop.sweeps import search_sampler
from hydraloop.sweeps.job_states import Job, JobState, Source
from hydraloop.sweeps.search import Rule, Search
from hydraloop.sweeps.search_history import History, HistoryReader, Trial, Validations
from hydraloop.sweeps.sweep_directory import SweepDirectory

ETA = 3
"""One of so many trials of a rung continues."""


def promotion(
    results: Sequence[Mapping[int, float]], promoted: Sequence[Collection[int]], rule: Rule
) -> tuple[int, int] | None:
    """Return the (rung, trial) to continue next, or None if a new trial is to start.

    The best `len(results[k]) // ETA` trials of rung `k` may leave it. The highest rung comes first, and in it the best
    trial. Of trials with equal values, the one with the lower number is better. A trial with NaN is not promoted.

    Args:
        results: the value of each trial that has reached a rung, by number, for each rung.
        promoted: the trials that have left each rung.
    """
    for rung in reversed(range(len(results))):
        for trial in _best(results[rung], len(results[rung]) // ETA, rule):
            if trial not in promoted[rung]:
                return rung, trial
    return None


def _best(values: Mapping[int, float], count: int, rule: Rule) -> list[int]:
    """Return at most `count` trials of a rung, the best one first, without those that have NaN."""
    sign = -1 if rule == "greater" else 1
    numbers = sorted((sign * value, trial) for trial, value in values.items() if not math.isnan(value))
    return [trial for _, trial in numbers[:count]]


def next_trial(history: History, *, is_last: bool) -> Trial | None:
    """Return the paused trial that continues; None if there is none.

    Args:
        is_last: whether no other trial runs or is to start. Then, if no trial has trained to its end, the best one of
            the highest rung continues.
    """
    trials = history.trials
    paused = [one for one in trials if one.state == "paused"]
    if not paused or not history.rules:
        return None
    rungs = range(max(len(one.curve) for one in trials))
    results = [{one.number: one.curve[rung + 1] for one in trials if rung < len(one.curve)} for rung in rungs]
    here = [{one.number for one in paused if len(one.curve) == rung + 1} for rung in rungs]
    found = promotion(results, [set(all_) - here_ for all_, here_ in zip(results, here, strict=True)], history.rules[0])
    if found is not None:
        return trials[found[1]]
    if not is_last or any(one.state == "complete" for one in trials):
        return None
    highest = max(len(one.curve) for one in paused)
    values = {one.number: one.curve[highest] for one in paused if len(one.curve) == highest}
    return trials[next(iter(_best(values, 1, history.rules[0])), min(values))]


_FIXED = "fixed_params"
"""In the notes of a trial that was enqueued; Optuna's name."""


class SearchSource(Source):
    """Gives the jobs that a search asks for.

    Args:
        directory: of the sweep.
        search: not masked.
        enqueue: `sweep.enqueue`, the trials that are run first.

    Raises:
        UserError: an enqueued trial is outside the space, or the sampler is not trusted.
    """

    def __init__(self, directory: SweepDirectory, search: Search, enqueue: Iterable[Any]) -> None:
        self._directory, self._search = directory, search
        self._enqueued = search_sampler.check(search, enqueue)
        self._open = set[int]()
        """Jobs that this controller runs."""
        self._left_alone = set[int]()
        """Jobs that have ended early, and are not started again."""
        self._validations: dict[tuple[int, int], Validations] = {}
        """Of running jobs, by their number and attempt."""
        self._ending: dict[int, str] = {}
        """Jobs that are to end as pruned, and why."""
        self._reader = HistoryReader(directory, search)
        self._history = self._reader.read()
        self._is_old = True
        """Whether a job has ended since the history was read."""

    @property
    def numbers(self) -> Sequence[int]:
        """All jobs of the search."""
        return range(max(self._search.trials, len(self._history.trials)) * self._search.repeats)

    def ended(self, state: JobState) -> None:
        """Note that a job has ended."""
        self._is_old = True
        self._ending.pop(state.number, None)
        self._open.discard(state.number)
        if state.state == "interrupted":
            self._left_alone.add(state.number)

    def next_job(self) -> Job | None:
        """Return a job that was asked for before, one that is promoted, or a new one. Takes as long as an ask."""
        self._read()
        job = self._waiting() or self._promoted() or self._asked()
        if job is not None:
            self._open.add(job.number)
        return job

    def look(self, running: Iterable[JobState]) -> Mapping[int, str]:
        """Decide which jobs end: those that are pruned, and those of a trial with a failed job."""
        jobs = list(running)
        if self._is_old:
            self._read()
        is_over = self._search.promote is not None and not jobs and self._is_last and self._next_paused() is None
        for trial in self._history.trials:
            if trial.state == "failed":
                self._end(trial, "another job of the trial has failed")
            elif trial.state == "paused" and is_over:
                self._end(trial, "it was not promoted")
        if self._search.prune is not None and self._history.metrics:
            for job in jobs:
                if job.number not in self._ending and self._prunes(job):
                    self._ending[job.number] = f"sweep.prune={self._search.prune}"
        return self._ending

    def _read(self) -> None:
        """Read the history again.

        Raises:
            UserError: nothing can be decided by it.
        """
        self._history = self._reader.read(self._open)
        self._is_old = False
        if self._history.problem is not None:
            raise self._history.problem

    @property
    def _is_last(self) -> bool:
        """Whether no trial runs or is to be asked for."""
        trials = self._history.trials
        return len(trials) >= self._search.trials and all(one.state != "running" for one in trials)

    # Which job is next. ----------------------------------------------------------------------------------------------

    def _waiting(self) -> Job | None:
        """Return a job that was asked for and does not run: it waits, or was interrupted."""
        for trial in self._history.trials:
            if trial.state == "running":
                for state in trial.jobs:
                    if not state.is_over and state.number not in self._open | self._left_alone:
                        return self._job(trial, state)
        return None

    def _next_paused(self) -> Trial | None:
        return None if self._search.promote is None else next_trial(self._history, is_last=self._is_last)

    def _promoted(self) -> Job | None:
        """Return a paused job that continues. It is `queued` until it runs."""
        trial = self._next_paused()
        if trial is None:
            return None
        (paused,) = trial.jobs
        value = trial.curve[len(trial.curve)]
        state = replace(paused, state="queued", reason=None, rungs=(*paused.rungs, value))
        self._directory.write(state)
        return self._job(trial, state)

    def _asked(self) -> Job | None:
        """Return the first job of a new trial; None if the search has all of them."""
        history, number, repeats = self._history, len(self._history.trials), self._search.repeats
        if number >= self._search.trials:
            return None
        enqueued = sum(_FIXED in trial.notes for trial in history.trials)
        given = self._enqueued[enqueued] if enqueued < len(self._enqueued) else None
        params, notes = search_sampler.suggest(self._search, history, given)
        trial = Trial(number, params, notes)
        for repeat in range(repeats):
            lines = tuple(mask_overrides(self._search.space.lines(params, repeat)))
            queued = self._directory.state(number * repeats + repeat)
            trial.jobs.append(replace(queued, overrides=lines, params=params, notes=notes))
            self._directory.write(trial.jobs[-1])
        history.trials.append(trial)
        return self._job(trial, trial.jobs[0])

    def _job(self, trial: Trial, state: JobState) -> Job:
        lines = self._search.space.lines(trial.params, state.number % self._search.repeats)
        if self._search.promote is not None:
            lines = (*lines, f"{PAUSE}={self._search.rung * ETA ** len(state.rungs)}")
        return Job(state.number, lines)

    # Which jobs end. -------------------------------------------------------------------------------------------------

    def _end(self, trial: Trial, why: str) -> None:
        self._ending.update({state.number: why for state in trial.jobs if not state.is_over})

    def _prunes(self, job: JobState) -> bool:
        """Return whether a running job ends early. Each new validation is shown to the pruner."""
        found = self._validations.get((job.number, job.attempts))
        if found is None:
            found = Validations(self._directory.run_dir(job), self._history.metrics[0])
            self._validations[job.number, job.attempts] = found
        trial = self._history.trials[job.number]
        space, history, last = self._search.space, self._history, self._search.validations
        return any(
            number != last and search_sampler.prunes(space, history, trial, found.values) for number, _ in found.read()
        )
