"""What a search decides besides the values of trials. Each decision follows from the history."""

from __future__ import annotations

import math

from hydraloop.sweeps.search import asha
from hydraloop.sweeps.search.history import History, Trial, rank
from hydraloop.sweeps.search.settings import Settings


def rungs(settings: Settings) -> tuple[int, ...]:
    """Return the validations after which a trial pauses, with `sweep.promote`."""
    return () if settings.promote is None else asha.rungs(settings.validations or 0, settings.rung)


def promotion(history: History, left: int) -> tuple[int, int] | None:
    """Return a rung and the paused trial that continues from there; None if there is none.

    If the search would end without a trial that has trained to its end, the best one of the highest rung continues.

    Args:
        left: the trials that may still be asked for.
    """
    if not history.rungs or not history.rules:
        return None
    found = asha.promotion(history.rungs, _left_rung(history), history.rules[0])
    is_last = not left and all(trial.state != "running" for trial in history.trials)
    return _foremost(history) if found is None and is_last else found


def _foremost(history: History) -> tuple[int, int] | None:
    """Return the highest rung with a paused trial, and its best one; None if a trial has trained to its end."""
    if any(trial.state == "complete" for trial in history.trials):
        return None
    for rung in reversed(range(len(history.rungs))):
        values = history.rungs[rung]
        paused = [one.number for one in history.trials if one.state == "paused" and max(one.curve) == rung + 1]
        if paused:
            return rung, min(paused, key=lambda number: (rank((values[number],), history.rules), number))
    return None


def cannot_continue(history: History, left: int) -> list[int]:
    """Return the paused trials at the end of a search: nothing runs, is asked for or is promoted any more.

    Args:
        left: the trials that may still be asked for.
    """
    if left or any(trial.state == "running" for trial in history.trials) or promotion(history, left) is not None:
        return []
    return [trial.number for trial in history.trials if trial.state == "paused"]


def _gone(history: History) -> list[Trial]:
    """Return the trials that reach no further rung."""
    return [trial for trial in history.trials if trial.state in ("failed", "pruned")]


def _left_rung(history: History) -> list[set[int]]:
    """Return the trials that are not paused at each rung that they have reached."""
    gone = {trial.number for trial in _gone(history)}
    return [promoted | gone.intersection(rung) for promoted, rung in zip(history.promoted, history.rungs, strict=True)]


def stale(history: History) -> int:
    """Return how many trials have ended since the best one was asked for; 0 if there is none."""
    best = history.best()
    ended = [trial.number for trial in history.trials if trial.state not in ("running", "paused")]
    return 0 if best is None else sum(number > best.number for number in ended)


def names(history: History, hours: float) -> dict[str, float]:
    """Return the values of the names in `sweep.until`.

    Args:
        hours: since the search began.
    """
    best = history.best()
    value = math.nan if best is None or best.values is None else best.values[0]
    return {"best": value, "hours": hours, "stale": stale(history)}
