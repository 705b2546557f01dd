"""SearchSource: gives the jobs of a search to a controller, and writes each decision into the log of the search.

Several controllers may share a search. The one that has the lock of the log decides; the others start what was decided,
or decide at their next look.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hydraloop.errors import UserError
from hydraloop.run_files.record_log import FILENAME as RECORDS
from hydraloop.sweeps.search import decisions, measures
from hydraloop.sweeps.search.history import History, Trial
from hydraloop.sweeps.search.log import SearchLog
from hydraloop.sweeps.search.sampler import Suggester
from hydraloop.sweeps.search.settings import Settings, until_condition
from hydraloop.sweeps.search.space import Params
from hydraloop.sweeps.search.trials import Trials
from hydraloop.sweeps.source import Job, Source
from hydraloop.sweeps.states import JobState
from hydraloop.sweeps.sweep_directory import SweepDirectory


class SearchSource(Source):
    """Gives the jobs that a search asks for.

    Args:
        directory: of the sweep.
        trials: of the search, not masked, with its log.
        settings: of the search.
        enqueued: the values of trials that are run first; the sampler chooses those that are missing.
        until: the condition that ends the search; None: all trials.
    """

    def __init__(
        self,
        directory: SweepDirectory,
        trials: Trials,
        settings: Settings,
        enqueued: Sequence[Params] = (),
        until: str | None = None,
    ) -> None:
        assert trials.log is not None
        self._directory, self._trials, self._settings, self._enqueued = directory, trials, settings, enqueued
        self._until = None if until is None else until_condition(until)
        self._log: SearchLog = trials.log
        self._rungs = decisions.rungs(settings)
        self._suggester = Suggester(trials.space, settings.sampler, settings.seed)
        self._given = set[int]()
        """Jobs that this controller runs, and those that are over."""
        self._over = set[int]()
        """Jobs that are over by their own files. The log may know it and a file not: a kill has cut it."""
        self._ahead = deque[Job]()
        """Jobs that were asked for before a slot was free."""
        self._untold = dict[int, JobState]()
        """Jobs whose end is not in the log yet."""
        self._ending = dict[int, str]()
        """Jobs that are to end as pruned, and why."""
        self._sizes = dict[int, int]()
        """Of the record log of each running job at the last look."""
        self._log.refresh()
        for trial in self._history.trials:
            self._settle(trial)

    @property
    def _history(self) -> History:
        return self._log.history

    @property
    def count(self) -> int:
        """The number of jobs, without those of trials that are not asked for any more."""
        return (len(self._history.trials) + self._left) * self._history.repeats

    def ended(self, state: JobState) -> None:
        """Note how a job has ended, which is written into the log with the next decision."""
        self._ending.pop(state.number, None)
        self._given.add(state.number)
        if state.is_over:
            self._over.add(state.number)
        if state.is_left:
            self._untold[state.number] = state
        if state.state == "paused":
            self._given.discard(state.number)

    def next_job(self) -> Job | None:
        """Return a job that was asked for before, one that is promoted, or a new one. Takes as long as an ask."""
        with self._log.deciding() as decides:
            self.waits = not decides
            if not decides:
                return None
            self._tell()
            job = self._waiting() or self._promoted() or self._asked()
        if job is not None:
            self._given.add(job.number)
        return job

    def look(self, running: Iterable[JobState]) -> Mapping[int, str]:
        """Write what running jobs have reached, decide which of them end, and ask for a job ahead."""
        jobs = list(running)
        grown = [job for job in jobs if self._has_grown(job)]
        asks = bool(jobs) and not self._ahead and self._left > 0
        is_last = self._settings.promote is not None and not jobs
        if self._untold or grown or asks or is_last:
            with self._log.deciding() as decides:
                if decides:
                    self._tell()
                    for job in grown:
                        self._note_curve(job)
                    self._drop_paused()
                    if asks and (job_ahead := self._waiting() or self._promoted() or self._asked()) is not None:
                        self._ahead.append(job_ahead)
                else:
                    self._sizes.clear()  # to look again
        return self._ending

    # Which job is next. ----------------------------------------------------------------------------------------------

    def _waiting(self) -> Job | None:
        """Return a job that was asked for and does not run: ahead, by another controller, or before a kill."""
        if self._ahead:
            return self._ahead.popleft()
        for trial in self._history.trials:
            if trial.state == "running":
                for number in decisions.open_jobs(self._history, trial):
                    if number not in self._given:
                        return self._job(number)
        return None

    def _promoted(self) -> Job | None:
        """Return a paused job that continues."""
        left = self._left
        found = decisions.promotion(self._history, left)
        if found is None:
            return None
        rung, trial = found
        self._log.append({"event": "promote", "trial": trial, "rung": rung, "left": left}, flush=True)
        return self._job(trial)

    def _asked(self) -> Job | None:
        """Return the first job of a new trial; None if the search has all of them."""
        history = self._history
        if self._left == 0:
            if len(history.trials) < self._trials.trials and not history.is_ended:
                self._log.append({"event": "end"}, flush=True)
            return None
        number, given = len(history.trials), None
        enqueued = sum(trial.given is not None for trial in history.trials)
        if enqueued < len(self._enqueued):
            given = self._enqueued[enqueued]
        params, attributes = self._suggester.suggest(history, number, given)
        event = {"event": "ask", "trial": number, "params": params, "attributes": attributes, "given": given}
        self._log.append(event, flush=True)
        return self._job(history.job(history.trials[number]))

    @property
    def _left(self) -> int:
        """The trials that may still be asked for."""
        history = self._history
        left = 0 if history.is_ended else max(0, self._trials.trials - len(history.trials))
        if left and self._until is not None:
            hours = (time.time() - self._directory.description.created) / 3600
            left = 0 if self._until.holds(decisions.names(history, hours), ()) else left
        return left

    def _job(self, number: int) -> Job:
        trial, repeat = self._history.of(number)
        lines = self._trials.space.lines(trial.params, repeat)
        if trial.rung < len(self._rungs):
            lines = (*lines, f"engine.pause_after={self._rungs[trial.rung]}")
        return Job(number, lines)

    # What the log is told. -------------------------------------------------------------------------------------------

    def _tell(self) -> None:
        """Write how jobs have ended."""
        for number, state in sorted(self._untold.items()):
            trial, _ = self._history.of(number)
            if state.state == "paused" or number not in self._history.told or trial.state == "failed":
                self._tell_one(trial, state)
            del self._untold[number]
            self._settle(trial)

    def _tell_one(self, trial: Trial, state: JobState) -> None:
        told = measures.measure(state, self._directory.run_dir(state), self._settings)
        if told.values is not None and told.metrics != (self._history.metrics or told.metrics):
            raise self._other_metric(state.number, told.metrics)
        metrics: dict[str, Any] = {"metrics": told.metrics, "rules": told.rules} if told.values is not None else {}
        if state.state == "paused":
            self._tell_rung(trial, state, {"value": told.values[0] if told.values else "nan"} | metrics)
        elif state.number not in self._history.told or told.state == "complete":
            if told.metrics and self._settings.prune is not None:
                for _ in self._new_curve(trial, state, told.metrics[0]):
                    pass
            event = {"event": "told", "job": state.number, "state": told.state, "values": told.values}
            self._log.append(event | metrics)

    def _other_metric(self, number: int, metrics: Sequence[str]) -> UserError:
        problem = f"job {number} monitors {metrics[0]}, and earlier results are values of {self._history.metrics[0]}"
        remedy = f"Start a search that names a metric of all jobs: 'sweep.objectives={{{metrics[0]}: max}}'."
        return UserError(problem, key="sweep.objectives", remedy=remedy)

    def _tell_rung(self, trial: Trial, state: JobState, measured: Mapping[str, Any]) -> None:
        rung = self._rungs.index(int(str(state.reason).rpartition("=")[2]))
        reached = self._history.rungs[rung] if rung < len(self._history.rungs) else {}
        if trial.number not in reached:
            self._log.append({"event": "rung", "trial": trial.number, "rung": rung, **measured})

    def _has_grown(self, job: JobState) -> bool:
        """Return whether a running job has new records, if they decide anything."""
        if self._settings.prune is None or not self._history.metrics:
            return False
        try:
            size = (self._directory.run_dir(job) / RECORDS).stat().st_size
        except OSError:
            return False
        return self._sizes.get(job.number) != size

    def _note_curve(self, job: JobState) -> None:
        """Write the validations of a running job, and whether it is to end."""
        trial, _ = self._history.of(job.number)
        self._sizes[job.number] = (self._directory.run_dir(job) / RECORDS).stat().st_size
        if trial.state != "running":
            return
        before = len(trial.curve)
        for _ in self._new_curve(trial, job, self._history.metrics[0]):
            if self._prunes(trial):
                self._prune(trial)
                return
        if len(trial.curve) == before and self._prunes(trial):  # a kill has prevented the decision
            self._prune(trial)

    def _prunes(self, trial: Trial) -> bool:
        is_last = max(trial.curve, default=0) >= (self._settings.validations or 0)
        return not is_last and self._suggester.prunes(self._history, trial)

    def _new_curve(self, trial: Trial, job: JobState, metric: str) -> Iterator[int]:
        """Write the validations that a job has added, one in each step."""
        for step, value in enumerate(measures.validations(self._directory.run_dir(job), metric), start=1):
            if step not in trial.curve:
                self._log.append({"event": "curve", "trial": trial.number, "validation": step, "value": value})
                yield step

    def _prune(self, trial: Trial) -> None:
        self._log.append({"event": "prune", "trial": trial.number}, flush=True)
        self._settle(trial)

    def _drop_paused(self) -> None:
        """Write which paused jobs do not continue, at the end of the search."""
        if self._settings.promote is not None:
            left = self._left
            for number in decisions.cannot_continue(self._history, left):
                self._log.append({"event": "prune", "trial": number, "left": left}, flush=True)
                self._settle(self._history.trials[number])

    def _settle(self, trial: Trial) -> None:
        """Note the jobs of a trial that is over which are to end."""
        if trial.state in ("running", "paused"):
            return
        why = {
            "pruned": "it was not promoted" if self._settings.promote else f"sweep.prune={self._settings.prune}",
            "failed": "another job of the trial has failed",
        }.get(trial.state, "the trial is complete")
        for repeat in range(self._history.repeats):
            job = self._history.job(trial, repeat)
            if job not in self._over:
                self._ending[job] = why
