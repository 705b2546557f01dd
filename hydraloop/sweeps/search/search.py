"""Search: what `sweep.json` has of a search: the space, the number of trials, and how it decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hydraloop.sweeps.search.settings import Settings
from hydraloop.sweeps.search.space import Space


@dataclass(frozen=True, slots=True)
class Search:
    """A search. Each trial is a job, or one for each value of the averaged key."""

    space: Space
    trials: int
    """`sweep.trials`."""
    settings: Settings = field(default_factory=lambda: Settings(0))
    is_ended: bool = False
    """Whether `sweep.until` has ended it."""

    @property
    def repeats(self) -> int:
        """The number of jobs of a trial."""
        return self.space.repeat_count

    def masked(self) -> Search:
        """Return the search with secrets masked."""
        return replace(self, space=self.space.masked(), settings=self.settings.masked())

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Search:
        """Return what `dataclasses.asdict` and JSON have made into lists and mappings."""
        space, settings = Space.from_json(content["space"]), Settings(**content["settings"])
        return cls(space, content["trials"], settings, content["is_ended"])
