"""SearchSource: gives the jobs of a search to the controller, and decides which of them end early.

Optuna's sampler chooses the values of a new trial; ASHA (`asha.py`) chooses which paused trial continues.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hydraloop.files.result import PAUSE
from hydraloop.files.secrets import mask_overrides
from hydraloop.sweeps import search_sampler
from hydraloop.sweeps.asha import ETA, next_promoted
from hydraloop.sweeps.job_source import Job, Source
from hydraloop.sweeps.job_states import JobState
from hydraloop.sweeps.search import Search
from hydraloop.sweeps.search_history import HistoryReader, Trial, Validations
from hydraloop.sweeps.sweep_directory import SweepDirectory

_FIXED = "fixed_params"
"""In the notes of a trial that was enqueued; Optuna's name."""


class SearchSource(Source):
    """Gives the jobs of a search.

    Every decision follows from the history, which is read from files. So a killed search continues as it would have.

    Args:
        directory: of the sweep.
        search: not masked.
        enqueue: `sweep.enqueue`, the trials that are run first.

    Raises:
        UserError: an enqueued trial is outside the space, or the sampler is not trusted.
    """

    def __init__(self, directory: SweepDirectory, search: Search, enqueue: Iterable[Any]) -> None:
        self._directory = directory
        self._search = search
        self._enqueued = search_sampler.check(search, enqueue)
        self._given = set[int]()
        """Jobs that this controller runs."""
        self._not_retried = set[int]()
        """Jobs that were interrupted, and that this controller does not start again."""
        self._validations: dict[tuple[int, int], Validations] = {}
        """Of running jobs, by their number and attempt."""
        self._prune_reasons: dict[int, str] = {}
        """Jobs that are to end early, and why."""
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
        self._given.discard(state.number)
        if state.state == "interrupted":
            self._not_retried.add(state.number)

    def next_job(self) -> Job | None:
        """Return a job of a trial that has begun, a promoted one, or one of a new trial. Takes as long as an ask."""
        self._read_history()
        job = self._job_of_begun_trial() or self._promoted_job() or self._job_of_new_trial()
        if job is not None:
            self._given.add(job.number)
        return job

    def jobs_to_prune(self, running: Iterable[JobState]) -> Mapping[int, str]:
        """Return the jobs of failed trials, paused jobs that are never promoted, and jobs that the pruner ends."""
        jobs = list(running)
        if self._is_history_old:
            self._read_history()
        has_promotions = bool(jobs) or not self._is_last_trial or self._next_promoted() is not None
        for trial in self._history.trials:
            if trial.state == "failed":
                self._prune_trial(trial, "another job of the trial has failed")
            elif trial.state == "paused" and self._search.promote is not None and not has_promotions:
                self._prune_trial(trial, "it was not promoted")
        if self._search.prune is not None and self._history.metrics:
            for job in jobs:
                if job.number not in self._prune_reasons and self._is_worse_than_others(job):
                    self._prune_reasons[job.number] = f"sweep.prune={self._search.prune}"
        return self._prune_reasons

    def _read_history(self) -> None:
        """Read the states of all jobs.

        Raises:
            UserError: nothing can be decided by them.
        """
        self._history = self._reader.read(self._given)
        self._is_history_old = False
        if self._history.problem is not None:
            raise self._history.problem

    @property
    def _is_last_trial(self) -> bool:
        """Whether no trial runs, and no further one is asked for."""
        trials = self._history.trials
        return len(trials) >= self._search.trials and all(one.state != "running" for one in trials)

    # Which job is next. ----------------------------------------------------------------------------------------------

    def _job_of_begun_trial(self) -> Job | None:
        """Return a job whose trial has values and that does not run: it waits, or was interrupted."""
        for trial in self._history.trials:
            if trial.state == "running":
                for state in trial.jobs:
                    if not state.is_over and state.number not in self._given | self._not_retried:
                        return self._job(trial, state)
        return None

    def _next_promoted(self) -> Trial | None:
        if self._search.promote is None:
            return None
        return next_promoted(self._history, is_last=self._is_last_trial)

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

    def _is_worse_than_others(self, job: JobState) -> bool:
        """Show each new validation of a running job to the pruner, and return whether it ends the job."""
        attempt = (job.number, job.attempts)
        if attempt not in self._validations:
            self._validations[attempt] = Validations(self._directory.run_dir(job), self._history.metrics[0])
        validations = self._validations[attempt]
        trial = self._history.trials[job.number]
        for number, _ in validations.read():
            is_end = number == self._search.validations
            if not is_end and search_sampler.prunes(self._search.space, self._history, trial, validations.values):
                return True
        return False
