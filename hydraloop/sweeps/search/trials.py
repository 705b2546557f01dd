"""The jobs of a search: what `Axes` is for a grid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from hydraloop.sweeps.axes import Axis
from hydraloop.sweeps.search.log import SearchLog
from hydraloop.sweeps.search.space import Space


@dataclass(frozen=True, slots=True)
class Trials:
    """The jobs of a search: the trials, each as often as the averaged key has values. What a job sets is in the log."""

    space: Space
    trials: int
    """`sweep.trials`."""
    log: SearchLog | None = field(default=None, compare=False)
    """None before the search has a directory."""

    @property
    def count(self) -> int:
        """The number of jobs, also of those that are not asked for yet, unless `sweep.until` has ended the search."""
        if self.log is not None:
            self.log.refresh()
            if self.log.history.is_ended:
                return len(self.log.history.trials) * self.space.repeat_count
        return self.trials * self.space.repeat_count

    @property
    def asked(self) -> int:
        """The number of trials that were asked for."""
        if self.log is None:
            return 0
        self.log.refresh()
        return len(self.log.history.trials)

    @property
    def title(self) -> str:
        """How many trials were asked for, before the numbers of jobs by their state."""
        return f"{self.asked:,} of {self.trials:,} trials; jobs"

    @property
    def compares_otherwise(self) -> bool:
        """Whether the best job need not be the one with the best monitored metric."""
        settings = {} if self.log is None else self.log.begin.get("settings", {})
        return bool(settings.get("objectives"))

    @property
    def swept(self) -> tuple[Axis, ...]:
        """The keys that differ between jobs."""
        return tuple(Axis((one.key,), ()) for one in self.space.varied)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """All keys."""
        constants = tuple(Axis((one.key,), ()) for one in self.space.dimensions if one.is_constant)
        return (*constants, *self.swept)

    def lines(self, number: int) -> tuple[str, ...]:
        """Return the overrides of a job; the constant ones of a job that was not asked for yet."""
        found = self._params(number)
        return self.space.lines({}) if found is None else self.space.lines(*found)

    def swept_lines(self, number: int) -> tuple[str, ...]:
        """Return the overrides of a job that other jobs do not have; none if it was not asked for yet."""
        found = self._params(number)
        return () if found is None else self.space.chosen(*found)

    def _params(self, number: int) -> tuple[dict[str, float | int | str], int] | None:
        if self.log is None:
            return None
        trial, repeat = divmod(number, self.space.repeat_count)
        if trial >= len(self.log.history.trials):
            self.log.refresh()
        trials = self.log.history.trials
        return (dict(trials[trial].params), repeat) if trial < len(trials) else None

    def to_json(self) -> dict[str, Any]:
        """Return the space and the number of trials, for `sweep.json`."""
        return {"space": asdict(self.space), "trials": self.trials}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Return what `to_json` wrote."""
        return cls(Space.from_json(content["space"]), content["trials"])

    def masked(self) -> Trials:
        """Return the same with secrets masked."""
        return replace(self, space=self.space.masked())

    def at(self, folder: Path) -> Trials:
        """Return the same with the log in the directory of the sweep."""
        return replace(self, log=SearchLog(folder, self.space.repeat_count))

    def widened(self, stored: Trials) -> Trials:
        """Return these trials, which continue a search. Errors: as of `Space.check_same`."""
        assert stored.log is not None
        stored.log.refresh()
        self.space.check_same(stored.space)
        return Trials(self.space, max(self.trials, len(stored.log.history.trials)), stored.log)
