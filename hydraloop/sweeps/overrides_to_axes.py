"""Which jobs a sweep has: the product of its axes, zipped axes, and a file with a job in each line."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, Override
from omegaconf import DictConfig, OmegaConf

from hydraloop.config import arguments
from hydraloop.errors import UserError, leave_out, missing_path, suggestion
from hydraloop.schemas.sweep import SweepConf
from hydraloop.sweeps.axes import Axis, Space, key_of, lines_of, space_of

_OF_GRID = ("zip", "jobs", "retry_failed")
_OF_SEARCH = ("sampler", "prune", "prune_after", "promote", "objectives", "enqueue")


def select(typed: Sequence[Override], in_files: Sequence[Override], options: DictConfig) -> list[Axis] | Space:
    """Return the axes of a sweep; with `sweep.trials`, the space of a search.

    Args:
        typed: all overrides, with those of the sweep itself, which its jobs do not get.
        in_files: those in `hydra.sweeper.params`. Typed ones have precedence.
        options: `sweep.*`.

    Raises:
        UserError: there are no such jobs.
    """
    of_jobs = [override for override in typed if not is_of_sweep(override)]
    for override in typed:
        if is_of_sweep(override) and override.is_sweep_override():
            key = override.key_or_group
            raise UserError("it holds for the whole sweep", key=key, remedy=f"Give it one value: {key}=…")
    for given in (of_jobs, in_files):
        _check_given_once(given)
    last = {_key(override): override for override in [*_allowed(in_files, "hydra.sweeper.params"), *of_jobs]}
    is_search, defaults = options.trials is not None, OmegaConf.structured(SweepConf)
    for name in _OF_GRID if is_search else _OF_SEARCH:
        if options[name] != defaults[name]:
            remedy = "Add the number of trials: sweep.trials=50"
            kind, remedy = ("search", leave_out(f"sweep.{name}")) if is_search else ("grid", remedy)
            raise UserError(f"a {kind} has no such option", key=f"sweep.{name}", remedy=remedy)
    if is_search:
        space = space_of(list(last.values()), str(options.average))
        if not space.dimensions:
            one = "optimizer.lr=tag(log,interval(1e-4,1e-1))"
            remedy = f"Add one: '{one}'"
            raise UserError("no key has several values to choose from", key="sweep.trials", remedy=remedy)
        return space
    axes = [Axis((key,), tuple((line,) for line in lines_of(override))) for key, override in last.items()]
    axes = _zipped(axes, options.zip)
    return axes if options.jobs is None else [_read_jobs(Path(options.jobs), axes), *axes]


def _check_given_once(overrides: Sequence[Override]) -> None:
    """Refuse a key that is swept and given again: the last override would replace the axis, and jobs would be missing.

    Args:
        overrides: of one command line, or of one config.
    """
    given: dict[str, Override] = {}
    for override in overrides:
        value: Any = override.value()
        values = value.list if isinstance(value, ChoiceSweep) else [value]
        keys = (key for one in values for key, _ in arguments.leaves(one, _key(override).lstrip("~")))
        for key in dict.fromkeys(keys):
            first = given.setdefault(key, override)
            if first is not override and (first.is_sweep_override() or override.is_sweep_override()):
                problem = f"it is given twice: {first.input_line} and {override.input_line}"
                raise UserError(problem, key=key, remedy="Leave one of them out, or list all values in one.")


def is_of_sweep(override: Override) -> bool:
    """Return whether an override is about the sweep, not about its jobs."""
    return override.is_hydra_override() or override.key_or_group.partition(".")[0] in ("sweep", "detach")


def _key(override: Override) -> str:
    return key_of(override.get_key_element())


def _allowed(overrides: Sequence[Override], where: str) -> Sequence[Override]:
    """Refuse overrides of the sweep itself where they would have no effect."""
    for override in overrides:
        if is_of_sweep(override):
            problem = f"{where} has {override.input_line}, which is not an option of a job"
            raise UserError(problem, key=override.key_or_group, remedy="Set it in config.yaml, or on the command line.")
    return overrides


def _zipped(axes: list[Axis], groups: Sequence[Any]) -> list[Axis]:
    """Return the axes with those of each group as one, in the place of the first of them."""
    for group in groups:
        if not OmegaConf.is_list(group):
            works = "Write a list of lists: 'sweep.zip=[[optimizer.lr,seed]]'."
            raise UserError(f"{group} is not a list of keys", key="sweep.zip", remedy=works)
        swept = [axis.keys[0] for axis in axes if len(axis.values) > 1 and len(axis.keys) == 1]
        for key in group:
            if key not in swept:
                problem = f"{key} is not swept, or is zipped already"
                raise UserError(problem, key="sweep.zip", remedy=suggestion(key, swept))
        zipped = [axis for axis in axes if axis.keys[0] in group]
        if len({len(axis.values) for axis in zipped}) > 1:
            counts = ", ".join(f"{axis.keys[0]} has {len(axis.values)}" for axis in zipped)
            problem = f"zipped axes need equally many values: {counts}"
            raise UserError(problem, key="sweep.zip", remedy="List one value for each job.")
        if zipped:
            values = zip(*(axis.values for axis in zipped), strict=True)
            one = Axis(tuple(axis.keys[0] for axis in zipped), tuple(sum(lines, ()) for lines in values))
            axes = [one if axis is zipped[0] else axis for axis in axes if axis is zipped[0] or axis not in zipped]
    return axes


def _read_jobs(file: Path, axes: Sequence[Axis]) -> Axis:
    """Return the axis with a value for each line of a file. Empty lines and comments (`#`) are left out."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        remedy = missing_path(file, "Name a text file.", "sweep.jobs")
        raise UserError(f"{file} cannot be read: {error}", key="sweep.jobs", remedy=remedy) from error
    keys, values = dict[str, None](), []
    for number, line in enumerate(text.splitlines(), 1):
        place = f"line {number} of {file}"
        try:
            lines = arguments.with_hook_options_swept(shlex.split(line, comments=True))
        except ValueError as error:
            raise UserError(f"{place}: {error}", key="sweep.jobs", remedy="Quote it as in bash.") from error
        for override in _allowed(arguments.parse(lines), place):
            if override.is_sweep_override():
                problem = f"{place} has several values: {override.input_line}"
                works = "Write a line for each, or sweep on the command line; a list has brackets."
                raise UserError(problem, key="sweep.jobs", remedy=works)
            keys[_key(override)] = None
        if lines:
            values.append(tuple(lines))
    twice = [key for axis in axes for key in axis.keys if key in keys]
    if twice:
        problem = f"{file} and the command line both set {', '.join(twice)}"
        raise UserError(problem, key="sweep.jobs", remedy="Set it in one of them.")
    if not values:
        raise UserError(f"{file} has no jobs", key="sweep.jobs", remedy="Write the overrides of one job in each line.")
    return Axis(tuple(keys), tuple(values))
