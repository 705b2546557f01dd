"""SearchSource: gives the jobs of a search to a controller.

A search has no log: what it knows is in the files of its jobs. The values of a trial are in `job.json` before its job
starts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hydraloop.cli.arguments import parse
from hydraloop.errors import UserError
from hydraloop.run_files.result import PAUSE
from hydraloop.safety.secrets import mask_overrides
from hydraloop.sweeps import queue
from hydraloop.sweeps.search import decisions
from hydraloop.sweeps.search.history import HistoryReader, Trial, rung_value
from hydraloop.sweeps.search.measures import Validations
from hydraloop.sweeps.search.sampler import Suggester, make
from hydraloop.sweeps.search.search import Search
from hydraloop.sweeps.search.settings import until_condition
from hydraloop.sweeps.search.space import Params, Space, Value
from hydraloop.sweeps.source import Job, Source
from hydraloop.sweeps.states import JobState
from hydraloop.sweeps.sweep_directory import SweepDirectory

_FIXED = "fixed_params"
"""In the notes of a trial that was enqueued; Optuna's name."""


class SearchSource(Source):
    """Gives the jobs that a search asks for.

    Args:
        directory: of the sweep.
        search: not masked.
        options: `sweep.*`: the trials that are run first, and the condition that ends the search.

    Raises:
        UserError: an enqueued trial is outside the space, or the sampler is not trusted.
    """

    def __init__(self, directory: SweepDirectory, search: Search, options: DictConfig) -> None:
        self._directory, self._search, self._settings = directory, search, search.settings
        make(self._settings.sampler, 0)  # refused now, not after the first job
        self._enqueued = [_point(search.space, one) for one in options.enqueue]
        self._until = None if options.until is None else until_condition(options.until)
        self._rungs = decisions.rungs(self._settings)
        self._suggester = Suggester(search.space, self._settings.sampler, self._settings.seed)
        self._given = set[int]()
        """Jobs that this controller runs, or leaves as they are."""
        self._open = set[int]()
        """Jobs that this controller runs."""
        self._curves: dict[tuple[int, int], _Curve] = {}
        """Of running jobs, by their number and attempt."""
        self._ending: dict[int, str] = {}
        """Jobs that are to end as pruned, and why."""
        self._reader = HistoryReader(directory, self._settings, search.repeats)
        self._history = self._reader.read()
        self._is_old = True
        """Whether a job has ended since the history was read."""

    @property
    def numbers(self) -> Sequence[int]:
        """The jobs, without those of trials that are not asked for any more."""
        return range((len(self._history.trials) + self._left) * self._history.repeats)

    def ended(self, state: JobState) -> None:
        """Note that a job has ended."""
        self._is_old = True
        self._ending.pop(state.number, None)
        self._given.add(state.number)
        self._open.discard(state.number)
        if state.state == "paused":
            self._given.discard(state.number)

    def next_job(self) -> Job | None:
        """Return a job that was asked for before, one that is promoted, or a new one. Takes as long as an ask."""
        self._read()
        self.waits = False
        job = self._waiting() or self._promoted() or self._asked()
        if job is not None:
            self._given.add(job.number)
            self._open.add(job.number)
        return job

    def look(self, running: Iterable[JobState]) -> Mapping[int, str]:
        """Decide which jobs end: those that are pruned, and those of a trial with a failed job."""
        jobs = list(running)
        if self._is_old:
            self._read()
        self._settle(is_last=not jobs)
        if self._settings.prune is not None and self._history.metrics:
            for job in jobs:
                if job.number not in self._ending and self._prunes(job):
                    self._ending[job.number] = f"sweep.prune={self._settings.prune}"
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

    # Which job is next. ----------------------------------------------------------------------------------------------

    def _waiting(self) -> Job | None:
        """Return a job that was asked for and does not run: it waits, or was interrupted."""
        for trial in self._history.trials:
            if trial.state == "running":
                for state in trial.jobs:
                    if not state.is_over and state.number not in self._given:
                        return self._job(trial, state)
        return None

    def _promoted(self) -> Job | None:
        """Return a paused job that continues. It is `queued` until it runs."""
        found = decisions.promotion(self._history, self._left)
        if found is None:
            return None
        trial = self._history.trials[found[1]]
        value = rung_value(trial.jobs[0], self._directory, self._settings)

        def promoted(state: JobState) -> JobState | None:
            is_paused = state.state == "paused"
            return replace(state, state="queued", reason=None, rungs=(*state.rungs, value)) if is_paused else None

        state = queue.change(self._directory, trial.number, promoted)
        if state is None or state.state != "queued":  # its process has not ended yet
            self.waits = True
            return None
        return self._job(trial, state)

    def _asked(self) -> Job | None:
        """Return the first job of a new trial; None if the search has all of them."""
        history, number = self._history, len(self._history.trials)
        if self._left == 0:
            if number < self._search.trials and not self._directory.is_ended:
                self._directory.end_search()
            return None
        enqueued = sum(_FIXED in trial.notes for trial in history.trials)
        given = self._enqueued[enqueued] if enqueued < len(self._enqueued) else None
        params, notes = self._suggester.suggest(history, number, given)
        trial = Trial(number, params, notes)
        for repeat in range(history.repeats):
            lines = tuple(mask_overrides(self._search.space.lines(params, repeat)))
            asked = {"overrides": lines, "params": params, "notes": notes}

            def with_values(state: JobState, asked: dict[str, Any] = asked) -> JobState:
                return replace(state, **asked)

            state = queue.change(self._directory, history.job(trial, repeat), with_values)
            assert state is not None, "nobody else has a job that was not asked for"
            trial.jobs.append(state)
        history.trials.append(trial)
        return self._job(trial, trial.jobs[0])

    @property
    def _left(self) -> int:
        """The trials that may still be asked for."""
        history = self._history
        left = 0 if self._directory.is_ended else max(0, self._search.trials - len(history.trials))
        if left and self._until is not None:
            hours = (time.time() - self._directory.description.created) / 3600
            left = 0 if self._until.holds(decisions.names(history, hours), ()) else left
        return left

    def _job(self, trial: Trial, state: JobState) -> Job:
        lines = self._search.space.lines(trial.params, state.number % self._history.repeats)
        if len(state.rungs) < len(self._rungs):
            lines = (*lines, f"{PAUSE}={self._rungs[len(state.rungs)]}")
        return Job(state.number, lines)

    # Which jobs end. -------------------------------------------------------------------------------------------------

    def _settle(self, *, is_last: bool) -> None:
        """Note the jobs that are to end: of a trial with a failed job, and paused ones that do not continue."""
        for trial in self._history.trials:
            if trial.state == "failed":
                self._end(trial, "another job of the trial has failed")
        if is_last and self._settings.promote is not None:
            for number in decisions.cannot_continue(self._history, self._left):
                self._end(self._history.trials[number], "it was not promoted")

    def _end(self, trial: Trial, why: str) -> None:
        self._ending.update({state.number: why for state in trial.jobs if not state.is_over})

    def _prunes(self, job: JobState) -> bool:
        """Return whether a running job ends early. Each new validation is shown to the pruner."""
        curve = self._curves.get((job.number, job.attempts))
        if curve is None:
            run_dir = self._directory.run_dir(self._directory.state(job.number))
            curve = _Curve(Validations(run_dir, self._history.metrics[0]))
            self._curves[job.number, job.attempts] = curve
        trial, _ = self._history.of(job.number)
        for number, value in curve.validations.read():
            curve.values[number] = value
            is_last = number >= (self._settings.validations or 0)
            if not is_last and self._suggester.prunes(self._history, trial, curve.values):
                return True
        return False


class _Curve:
    """The validations of a running job until now."""

    def __init__(self, validations: Validations) -> None:
        self.validations, self.values = validations, dict[int, float]()


def _point(space: Space, given: Any) -> Params:
    """Return the values of an enqueued trial.

    Raises:
        UserError: it is no mapping, or one of the values is not in the space.
    """
    key = "sweep.enqueue"
    values = OmegaConf.to_container(given) if OmegaConf.is_dict(given) else None
    if not isinstance(values, dict):
        raise UserError("an entry is not a trial", key=key, remedy="Write 'sweep.enqueue=[{optimizer.lr: 1e-3}]'.")
    dimensions, found = {one.key: one for one in space.searched}, dict[str, Value]()
    for name, value in ((str(name), value) for name, value in values.items()):
        one = dimensions.get(name)
        if one is None:
            raise UserError(f"{name} is not searched", key=key, remedy=f"Use {', '.join(dimensions)}.")
        same = (choice for choice in one.choices if parse([f"{one.element}={choice}"])[0].value() == value)
        found[one.key] = one.read(next(same, str(value)), key=key)
    return found
