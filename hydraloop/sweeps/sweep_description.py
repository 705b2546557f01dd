"""Description: the contents of `sweep.json`, which defines a sweep."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hydraloop.errors import UserError, missing_path
from hydraloop.files import atomic
from hydraloop.files.regular import read_json
from hydraloop.files.secrets import mask_overrides
from hydraloop.sweeps.jobs import Jobs

FILENAME = "sweep.json"


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
