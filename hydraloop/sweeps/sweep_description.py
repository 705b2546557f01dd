"""Description: the contents of `sweep.json`, which defines a sweep."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hydraloop.errors import UserError, missing_path
from hydraloop.files import atomic
from hydraloop.files.atomic import read_json
from hydraloop.files.result import PAUSE
from hydraloop.files.secrets import mask_overrides
from hydraloop.sweeps.axes import Axis, Lines, jobs_of, key_of
from hydraloop.sweeps.search import Search

FILENAME = "sweep.json"


@dataclass(frozen=True, slots=True)
class Jobs:
    """The jobs of a grid, or the search that asks for jobs. Secrets are masked in `sweep.json`."""

    listed: tuple[Lines, ...]
    """The overrides of each job. Of a search: none. What its jobs set is in their own files."""
    swept: tuple[str, ...]
    """The keys that differ between jobs."""
    search: Search | None = None

    @classmethod
    def of_axes(cls, axes: Sequence[Axis]) -> Jobs:
        """Return the jobs of a grid."""
        swept = dict.fromkeys(key for axis in axes if len(axis.values) > 1 for key in axis.keys)
        return cls(tuple(jobs_of(axes)), tuple(swept))

    @classmethod
    def of_search(cls, search: Search) -> Jobs:
        """Return the jobs of a search."""
        return cls((), search.space.swept, search)

    @property
    def count(self) -> int:
        """The number of jobs. Of a search: also those that it has not asked for."""
        return len(self.listed) if self.search is None else self.search.trials * self.search.repeats

    def masked(self) -> Jobs:
        """Return the jobs with secrets masked."""
        search = None if self.search is None else self.search.masked()
        return Jobs(tuple(tuple(mask_overrides(lines)) for lines in self.listed), self.swept, search)

    def title(self, known: int) -> str:
        """Return the number of jobs, or of trials, before the numbers of jobs by their state.

        Args:
            known: the number of jobs, without those that a search has not asked for.
        """
        if self.search is None:
            return f"{known:,} jobs"
        return f"{-(-known // self.search.repeats):,} of {self.search.trials:,} trials; jobs"

    def swept_lines(self, lines: Sequence[str]) -> list[str]:
        """Return the overrides of a job that other jobs do not have."""
        return [line for line in lines if key_of(line) in self.swept]

    def joined(self, new: Jobs) -> tuple[Jobs, dict[int, Lines]]:
        """Return the jobs of this sweep, masked, and those of a command line, which are not.

        Jobs with the same overrides are the same, in any order and with any `engine.pause_after` that is not swept;
        the same job twice is two jobs. New jobs get the highest numbers.

        Returns:
            The jobs, with those that the command line does not name, and the overrides of those that it names.
        """
        swept = tuple(dict.fromkeys((*self.swept, *new.swept)))
        places = {identity: number for number, identity in enumerate(_identities(self.listed, swept))}
        listed, named = list(self.listed), dict[int, Lines]()
        for lines, identity in zip(new.listed, _identities(new.masked().listed, swept), strict=True):
            number = places.setdefault(identity, len(listed))
            listed[number : number + 1] = [lines]
            named[number] = lines
        return Jobs(tuple(listed), _varied(listed, swept)), named

    @classmethod
    def from_json(cls, content: Any) -> Jobs:
        """Return what `dataclasses.asdict` and JSON have made into lists and mappings."""
        search = None if content["search"] is None else Search.from_json(content["search"])
        return cls(tuple(map(tuple, content["listed"])), tuple(content["swept"]), search)


def _identities(listed: Sequence[Lines], swept: Sequence[str]) -> list[tuple[Lines, int]]:
    """Return what is equal for equal jobs, and how many equal jobs there are before each."""
    seen, found = Counter[Lines](), []
    for lines in listed:
        identity = tuple(sorted(line for line in lines if key_of(line) != PAUSE or PAUSE in swept))
        found.append((identity, seen[identity]))
        seen[identity] += 1
    return found


def _varied(listed: Sequence[Lines], swept: Sequence[str]) -> tuple[str, ...]:
    """Return the keys that are swept, and those that only some jobs set, or with different values."""
    counts = Counter(line for lines in listed for line in lines)
    others = [key_of(line) for line, count in counts.items() if count < len(listed)]
    return tuple(dict.fromkeys([*swept, *(key for key in others if key != PAUSE)]))


@dataclass(frozen=True, slots=True)
class Description:
    """The contents of `sweep.json`. Secrets are masked."""

    uid: str
    created: float
    """Seconds since 1970."""
    command: tuple[str, ...]
    """`("python", "train.py")`, and Hydra's flags."""
    overrides: tuple[str, ...]
    """As typed, with axes."""
    configs: Mapping[str, Mapping[str, Any]]
    """What must not change when the sweep is resumed, see `SweepDraft.configs`."""
    subdir: str
    """`hydra.sweep.subdir`, not resolved."""
    jobs: Jobs
    average: str
    """The key over which results are averaged."""
    git: dict[str, Any]
    """`commit`, and `dirty`: whether tracked files differed from it."""

    @property
    def averaged(self) -> str | None:
        """The key over which results are averaged; None if it is not swept."""
        return self.average if self.average in self.jobs.swept else None

    def masked(self) -> Description:
        """Return the description with secrets masked."""
        overrides, command = (tuple(mask_overrides(lines)) for lines in (self.overrides, self.command))
        return replace(self, jobs=self.jobs.masked(), overrides=overrides, command=command)

    def write(self, folder: Path) -> None:
        """Write the file atomically.

        Raises:
            OSError: it cannot be written.
        """
        content = {**asdict(replace(self, jobs=Jobs((), ()))), "jobs": asdict(self.jobs)}
        atomic.write_text(folder / FILENAME, json.dumps(content) + "\n")


def read(folder: Path, *, key: str | None = None) -> Description:
    """Read the file.

    Args:
        folder: the directory of a sweep.
        key: the option that has named it.

    Raises:
        UserError: the directory holds no sweep.
    """
    try:
        content = read_json(folder / FILENAME)
        lists = {name: tuple(content[name]) for name in ("command", "overrides")}
        return Description(**{**content, **lists, "jobs": Jobs.from_json(content["jobs"])})
    except FileNotFoundError:
        problem: str = "is not the directory of a sweep"
        remedy: str = missing_path(folder, "Name one, multirun/<date>/<sweep>.")
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        problem = f"has a damaged {FILENAME}"
        remedy = "Copy that file again, or start a new sweep. The results of its jobs are in their result.json."
    raise UserError(f"{folder} {problem}", key=key, remedy=remedy)
