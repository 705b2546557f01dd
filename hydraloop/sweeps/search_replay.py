"""Decide again what a search has decided, from its directory, and compare."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hydraloop.errors import UserError
from hydraloop.sweeps.search import decisions, measures
from hydraloop.sweeps.search.history import Event
from hydraloop.sweeps.search.log import SearchLog
from hydraloop.sweeps.search.sampler import Suggester
from hydraloop.sweeps.search.settings import Settings
from hydraloop.sweeps.search.space import Space
from hydraloop.sweeps.search.trials import Trials
from hydraloop.sweeps.sweep_directory import SweepDirectory


@dataclass
class Replay:
    """The decisions of a search, made again."""

    counts: Counter[str] = field(default_factory=Counter)
    """The events of each kind that were compared."""
    differing: list[str] = field(default_factory=list)
    """What differs, for people."""


def replay(directory: SweepDirectory) -> Replay:
    """Decide again. Takes as long as all asks together: 5 to 100 ms each.

    Raises:
        UserError: the sweep is no search, or its log is damaged.
    """
    trials = directory.description.axes
    if not isinstance(trials, Trials):
        problem = f"{directory.path} is a grid, which decides nothing"
        raise UserError(problem, remedy="Name the directory of a search, or of a run with iteration=<n>.")
    found, again = Replay(), _Again(SearchLog(directory.path, trials.space.repeat_count))
    try:
        for event in again.log.events():
            _compare(directory, event, again, found)
    except (ValueError, TypeError, LookupError, AttributeError, AssertionError) as error:
        raise again.log.damaged() from error
    return found


def _compare(directory: SweepDirectory, event: Event, again: _Again, found: Replay) -> None:
    """Decide again what an event of the log says, before it is added to the history."""
    kind = event["event"]
    expected = _of_job(directory, event, again) if kind == "told" else again.decided(event)
    if expected is not None:
        found.counts[kind] += 1
        if not _equal(expected, event):
            found.differing.append(f"{kind} {event.get('trial', event.get('job'))}: {expected}, not {dict(event)}")
    if kind == "begin":
        again.begin(event)


class _Again:
    """Decides by a history that grows with each event."""

    def __init__(self, log: SearchLog) -> None:
        self.log = log
        self.settings = Settings(0)
        self._suggester = Suggester(Space(()), "random", 0)

    def begin(self, event: Event) -> None:
        """Take a new space and new settings."""
        self.settings = Settings.from_json(event["settings"])
        space, settings = Space.from_json(event["space"]), self.settings
        self._suggester = Suggester(space, settings.sampler, settings.seed)

    def decided(self, event: Event) -> Mapping[str, Any] | None:
        """Return what an event of this kind says if it is decided again; None if it is no decision."""
        history, trial, kind = self.log.history, event.get("trial", 0), event["event"]
        if kind == "ask":
            params, attributes = self._suggester.suggest(history, trial, event["given"])
            return {"trial": len(history.trials), "params": params, "attributes": attributes}
        if kind == "promote":
            rung, promoted = decisions.promotion(history, event["left"]) or (None, None)
            return {"trial": promoted, "rung": rung}
        if kind == "prune" and event.get("left") is None:
            return {"trial": trial if self._suggester.prunes(history, history.trials[trial]) else None}
        if kind == "prune":
            return {"trial": trial if trial in decisions.cannot_continue(history, event["left"]) else None}
        return None


def _of_job(directory: SweepDirectory, event: Event, again: _Again) -> Mapping[str, Any]:
    """Return what the files of a job say of its end."""
    state = directory.state(event["job"])
    told = measures.measure(state, directory.run_dir(state), again.settings)
    return {"state": told.state, "values": None if told.values is None else list(told.values)}


def _equal(expected: Mapping[str, Any], event: Event) -> bool:
    """Return whether an event says what was expected. NaN equals NaN."""
    return all(_plain(value) == _plain(event[name]) for name, value in expected.items())


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return "nan" if isinstance(value, float) and math.isnan(value) else value
