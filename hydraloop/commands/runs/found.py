"""The runs and jobs in a folder, as `hydraloop runs` lists them, from their files. Imports no torch.

A thousand take half a second of a processor. So only those parts of a config are parsed that somebody asks for.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from hydraloop.errors import UserError
from hydraloop.run_files import lock
from hydraloop.run_files.attempts import RECORDS, typed_overrides
from hydraloop.run_files.environment import shown
from hydraloop.run_files.record_log import FILENAME as LOG
from hydraloop.run_files.result import FILENAME as RESULT
from hydraloop.run_files.result import PAUSE, Objective, Result
from hydraloop.run_files.run_directory import SWEEP_FILE, config_file
from hydraloop.safety.secrets import mask_overrides
from hydraloop.sweeps import sweep_description
from hydraloop.sweeps.current_states import current_states
from hydraloop.sweeps.states import JobState
from hydraloop.sweeps.sweep_directory import SweepDirectory

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster, if PyYAML was built with libyaml
_DAY = 86_400.0
MISSING = float("nan")
"""The value of a name that a run does not have: each comparison with it is false, except for `!=`."""
NAMES = ("run", "status", "experiment", "typed", "hooks", "tags", "size", "seconds", "days", "job", "value", "metric")
"""What a condition can name of each run, besides metrics, `test.<metric>`, counters and options."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run, or a job of a sweep."""

    path: Path
    is_job: bool
    status: str
    """A `states.State`; `unknown` for the run of another program, or if its files cannot be read."""
    typed: list[str]
    """Overrides as typed, secrets masked."""
    result: Result
    """Empty if the file cannot be read."""
    size: int
    """Bytes of all files."""
    changed: float
    """When the newest file was written, in seconds since 1970."""
    has_others: bool
    """Whether another run or a sweep is in a folder of the run."""
    config: str
    """`config.yaml` as text; empty without one."""

    @property
    def experiment(self) -> str:
        """The option `experiment_name`; empty if it is not known."""
        found = self._section("experiment_name")
        return found if isinstance(found, str) else ""

    @property
    def hooks(self) -> list[str]:
        """The names of the selected hooks, without default hooks."""
        return [name for name, options in self._hooks() if options]

    @property
    def tags(self) -> list[str]:
        """What the trackers' options `tags` have: `baseline`, or `team=a` for a tag with a value."""
        if "tags:" not in self.config:  # saves most of the time
            return []
        found = [options.get("tags") for _, options in self._hooks() if isinstance(options, Mapping)]
        labels = [tag for tags in found if isinstance(tags, list) for tag in tags if isinstance(tag, str)]
        pairs = [pair for tags in found if isinstance(tags, Mapping) for pair in tags.items()]
        labels += [f"{name}={value}" for name, value in pairs if isinstance(value, str | int | float)]
        return list(dict.fromkeys(labels))

    def value(self, name: str) -> Any:
        """Return what a condition means by a name; `MISSING` if the run has nothing of the name."""
        if name in ("experiment", "hooks", "tags"):
            return getattr(self, name)
        goal, result = self.result.objective, self.result
        known: dict[str, Any] = {f"test.{metric}": value for metric, value in result.test_metrics.items()}
        known |= {**result.progress, **result.val_metrics}
        known |= {} if goal is None else {goal.metric: goal.value, "value": goal.value, "metric": goal.metric}
        known |= {"run": shown(self.path), "job": self.is_job, "status": self.status, "typed": self.typed}
        known |= {"size": self.size, "seconds": result.seconds, "days": (time.time() - self.changed) / _DAY}
        return known[name] if name in known else self._option(name)

    def _option(self, key: str) -> Any:
        first, *rest = key.split(".")
        value = self._section(first)
        for name in rest:
            value = value.get(name, MISSING) if isinstance(value, Mapping) else MISSING
        if isinstance(value, str) and "${" in value:
            with suppress(Exception):  # an interpolation of the job: as written
                return OmegaConf.select(OmegaConf.create(yaml.load(self.config, _Loader)), key)
        return value

    def _section(self, name: str) -> Any:
        """Return the value of a key without dots. hydraloop begins a line of the file only with such a key."""
        found = re.search(rf"^{re.escape(name)}:.*\n(?:(?:[ \t-].*)?\n)*", self.config, re.MULTILINE)
        try:
            return MISSING if found is None else yaml.load(found[0], _Loader)[name]
        except (yaml.YAMLError, ValueError, TypeError, RecursionError):  # written by another program
            return MISSING

    def _hooks(self) -> list[tuple[str, Any]]:
        found = self._section("hooks")
        return list(found.items()) if isinstance(found, Mapping) else []


def find(folder: Path, *, in_sweep: bool = False) -> Iterator[Run]:
    """Yield the runs in a folder and below it, by name. No link in the folder is followed."""
    below: dict[str, bool] = {}
    with suppress(OSError), os.scandir(folder) as entries:
        below = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
    if sweep_description.FILENAME in below:
        with suppress(UserError, TypeError):  # it is damaged: what is below is found as in any folder
            started = [state for state in current_states(SweepDirectory.load(folder)) if state.state != "queued"]
            yield from [_job(folder, state) for state in started]
            return
    in_sweep |= SWEEP_FILE in below
    if not below.keys().isdisjoint((RECORDS, RESULT, LOG)):
        yield _run(folder, in_sweep)
        return
    for name in sorted(below, key=lambda name: (len(name), name)):
        if below[name] and name[0] != ".":
            yield from find(folder / name, in_sweep=in_sweep)


def _run(path: Path, is_job: bool, typed: list[str] | None = None) -> Run:
    result, size, changed, has_others = _result(path), *files_in(path)
    config = ""
    with suppress(OSError, ValueError):
        file = config_file(path)
        config = "" if file is None else file.read_text(encoding="utf-8")
    status: str = "unknown" if result is None else result.status
    if lock.holder(path) is not None:
        status = "running"
    elif result is None and "\nexperiment_name: " in f"\n{config}":
        status = "interrupted"
    elif result is not None and (result.preempted_by or "").startswith(PAUSE):
        status = "paused"
    typed = typed_overrides(path) if typed is None else typed
    return Run(path, is_job, status, typed, result or Result("failed"), size, changed, has_others, config)


def _job(sweep: Path, state: JobState) -> Run:
    """Return a job.

    Raises:
        TypeError: another program has written its state, which could name any directory.
    """
    path = sweep / state.directory
    is_ours = isinstance(state.seconds, int | float) and isinstance(state.metric, str | None)
    if not (is_ours and isinstance(state.state, str) and path.resolve().is_relative_to(sweep.resolve())):
        raise TypeError(state)
    found = _run(path, True, mask_overrides(state.overrides))
    goal = found.result.objective
    if state.metric is not None and state.value is not None:
        goal = Objective(state.metric, state.rule, state.value, state.step or 0)
    result = replace(found.result, error=state.error, objective=goal, seconds=state.seconds)
    return replace(found, status=state.state, result=result)


def _result(path: Path) -> Result | None:
    """Return what `result.json` says; None if it cannot be read, or another program has written it."""
    found = Result.read(path)
    goal = None if found is None else found.objective
    is_ours = found is not None and isinstance(found.progress, dict) and isinstance(found.seconds, int | float)
    return found if is_ours and (goal is None or isinstance(goal.metric, str)) else None


def files_in(folder: Path | str, *, below: bool = False) -> tuple[int, float, bool]:
    """Return the size of all files, when the newest was written, and whether another run is in a folder below."""
    size, changed, has_others = 0, 0.0, False
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            has_others |= below and entry.name == RECORDS
            if entry.is_dir(follow_symlinks=False):
                part = files_in(entry.path, below=True)
                size, changed, has_others = size + part[0], max(changed, part[1]), has_others or part[2]
            else:
                stat = entry.stat(follow_symlinks=False)
                size, changed = size + stat.st_size, max(changed, stat.st_mtime)
    return size, changed, has_others
